"""A model that is materialized part by part has the bits of one that is built at once."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from unisono.errors import InvalidInput
from unisono.layout.deferred import DeferredModel, record
from unisono.tasks.builtin.gpt import GPT

Build = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- models


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))


def cnn() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
    return model.to(memory_format=torch.channels_last)


def initialised(fill: Callable[[Tensor], object]) -> Build:
    """Two layers whose own initialisation is overwritten."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))
        for layer in model:
            fill(layer.weight)
        return model

    return build


def two_phases() -> nn.Module:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    model = nn.Sequential(nn.Embedding(30, 16, padding_idx=3), mlp(), nn.LayerNorm(10), nn.LSTM(10, 8, 2))
    model.apply(initialise)
    with torch.no_grad():
        model[0].weight[3].zero_()
        model[1][2].weight.mul_(0.5)
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.right.weight.copy_(self.left.weight.t())
        self.copied = copy.deepcopy(self.left)
        self.left.bias.requires_grad_(False)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        position = torch.arange(10).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, 8, 2) * (-math.log(1e4) / 8))
        table = torch.zeros(10, 8)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * frequency), torch.cos(position * frequency)
        self.register_buffer("table", table)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 5, 5).bool(), persistent=False)
        self.register_buffer("waves", torch.polar(torch.rand(3), torch.rand(3)))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("given", torch.tensor([[1, 2], [3, 4]]))
        self.scale = nn.Parameter(torch.tensor(0.25) * torch.ones(3))


class Reads(nn.Module):
    """Python asks for values while it builds."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(9, 9 if self.first.weight.sum() > 0 else 7)
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm().item())
            while self.second.weight.std() < 0.4:
                self.second.weight.add_(torch.randn_like(self.second.weight), alpha=0.1)
            self.first.weight[self.first.weight < 0] = 0.5
            self.first.weight[torch.randperm(9)[:3]] *= 2
            self.first.bias.copy_(torch.from_numpy(self.first.bias.detach().numpy() * 2))
            self.second.bias[:3] = torch.tensor(self.first.bias.tolist()[:3])
        assert torch.equal(self.first.bias, self.first.bias.clone())
        self.rows = nn.Parameter(self.first.weight.detach()[self.first.bias.detach() > 0].clone())


class Seeds(nn.Module):
    """Generators are seeded, saved, put back and forked."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(5))
        saved = torch.get_rng_state()
        self.once = nn.Parameter(torch.randn(33))
        torch.set_rng_state(saved)
        self.again = nn.Parameter(torch.randn(33))
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.inside = nn.Parameter(torch.rand(7))
        self.after = nn.Parameter(torch.randn(3))
        torch.manual_seed(torch.initial_seed() + 1)
        self.seeded = nn.Parameter(torch.randn(3))
        torch.manual_seed(torch.initial_seed())
        self.repeated = nn.Parameter(torch.randn(3))
        own = torch.Generator().manual_seed(3)
        self.own, self.other = nn.Parameter(torch.randn(4, generator=own)), nn.Parameter(torch.empty(4))
        nn.init.uniform_(self.other, generator=own)


class Legacy(nn.Module):
    """Old constructors, data from elsewhere, ``.data``, dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.Tensor(6, 6)), nn.Parameter(torch.FloatTensor(6).fill_(2))
        self.c, self.d = (
            nn.Parameter(torch.Tensor([1.0, 2.0])),
            nn.Parameter(torch.from_numpy(np.arange(3.0))),
        )
        self.a.data.uniform_(-1, 1)
        self.a.data[0].zero_()
        self.a.data.clamp_(-0.5, 0.5)
        self.b.data = torch.randn(6).to("cpu", torch.float64).mul_(0.5)
        self.embedding = nn.Embedding.from_pretrained(torch.arange(12.0).view(3, 4), freeze=False)
        self.half = nn.Linear(4, 4).to("cpu").bfloat16()
        with torch.no_grad():
            torch._foreach_mul_([self.a, self.c], 3.0)
            torch.add(self.a, 1, out=self.a)
        self.normal = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.turned = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        torch.set_default_dtype(torch.float64)
        self.default = nn.Parameter(torch.arange(3) / 7)
        torch.set_default_dtype(torch.float32)


class Passes(nn.Module):
    """A forward pass with dropout, and gradients, during the build."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        loss = F.mse_loss(self.net(torch.randn(8, 6)), torch.zeros(8, 6))
        loss.backward()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


class Content(nn.Module):
    """Shapes and effects that depend on content, so that they cannot be foreseen."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))
        self.grown = nn.Parameter(torch.Tensor().resize_(3, 4).normal_())
        with torch.no_grad():
            self.w.put_(torch.tensor([1, 2]), torch.tensor([9.0, 8.0]))
            self.w[self.w > 0] = torch.randn(int((self.w > 0).sum()))
            self.w.index_put_((self.w.sum(1) > 0,), torch.tensor(3.0))
            self.w.masked_scatter_(self.w > 1, torch.randn(36))
            self.different = nn.Parameter(torch.unique(self.w))
            self.counted_names = nn.Parameter(torch.bincount(torch.tensor([1, 1, 3])).float())
            self.picked = nn.Parameter(self.w[torch.multinomial(torch.rand(6), 3)])
            self.rare = nn.Parameter(torch.poisson(torch.rand(9) * 5))
            self.sorted = nn.Parameter(self.w.sort(0).values)
        torch.poisson(torch.rand(30) * 50)  # how much this draws depends on content, though nobody needs it
        self.last = nn.Parameter(torch.randn(3))
        with torch.inference_mode():
            inference = torch.rand(3)
        self.inferred = nn.Parameter(inference.clone())


def seeded(build: Build) -> Build:
    def seeding() -> nn.Module:
        torch.manual_seed(1234)
        return build()

    return seeding


FILLS: dict[str, Callable[[Tensor], object]] = {
    "orthogonal": nn.init.orthogonal_,
    "trunc normal": nn.init.trunc_normal_,
    "trunc normal, redrawn": lambda w: nn.init.trunc_normal_(w, std=1.5),
    "trunc normal, tail": lambda w: nn.init.trunc_normal_(w, a=1.0, b=2.0),
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "xavier": nn.init.xavier_uniform_,
    "kaiming": lambda w: nn.init.kaiming_normal_(w, mode="fan_out"),
    "eye": nn.init.eye_,
    "constant": lambda w: nn.init.constant_(w, 0.1),
    "odd draws": lambda w: w.data.exponential_().add_(torch.bernoulli(torch.full_like(w, 0.4))),
    "by element": lambda w: w.data.copy_(torch.normal(torch.rand(w.shape), 2.0)),
}
BUILDS: dict[str, Build] = {
    "linear": lambda: nn.Linear(7, 5),
    "mlp": mlp,
    "mlp, bf16": lambda: mlp().to(torch.bfloat16),
    "cnn": cnn,
    "lstm": lambda: nn.LSTM(8, 8, 2, bidirectional=True),
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    "embedding": lambda: nn.Embedding(11, 6, padding_idx=2),
    "gpt": GPT(layers=2, width=32, heads=2, context=16).build,
    "two phases": two_phases,
    "tied": Tied,
    "buffers": Buffers,
    "reads": Reads,
    "seeds": Seeds,
    "legacy": Legacy,
    "passes": Passes,
    "content": Content,
    "no parameters": nn.ReLU,
    **{f"init {name}": initialised(fill) for name, fill in FILLS.items()},
    **{f"{build.__name__}, seeded": seeded(build) for build in (mlp, Reads, Seeds)},
}


def transformers_models() -> dict[str, Build]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    gpt2 = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0)
    llama = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=99)
    bert = transformers.BertConfig(**sizes, vocab_size=99)
    automatic = transformers.AutoModelForCausalLM.from_config
    return {
        "gpt2": lambda: transformers.GPT2LMHeadModel(gpt2),
        "llama": lambda: transformers.LlamaForCausalLM(llama),
        "llama, bf16": lambda: automatic(llama, dtype=torch.bfloat16),
        "bert": lambda: transformers.BertForMaskedLM(bert),
    }


# --- the law


def everything(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def ties(model: nn.Module) -> list[list[str]]:
    """Names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(names.values())


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def assert_same(kept: dict[str, Tensor], model: nn.Module) -> None:
    expected = everything(model)
    assert list(kept) == list(expected)
    for name, tensor in expected.items():
        found = kept[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert found.numel() == 0 or torch.equal(bits(found), bits(tensor)), name


def check(build: Build, seed: int = 3) -> DeferredModel:
    """Build at once and put off, from the same state; the two must not differ in any bit."""
    torch.manual_seed(seed)
    ordinary = build()
    end = torch.get_rng_state()

    torch.manual_seed(seed)
    before = torch.get_rng_state()
    deferred = record(build)
    assert torch.equal(torch.get_rng_state(), before)
    if not deferred.whole:
        assert all(tensor.is_meta for tensor in everything(deferred.model).values())
    shapes = {name: (p.shape, p.stride(), p.dtype, p.requires_grad) for name, p in everything(deferred.model).items()}
    assert shapes == {name: (p.shape, p.stride(), p.dtype, p.requires_grad) for name, p in everything(ordinary).items()}
    assert ties(deferred.model) == ties(ordinary)

    torch.manual_seed(seed + 1)  # whatever happened in between does not matter
    torch.randn(3)
    assert_same(deferred.materialize(lambda name, whole: whole), ordinary)
    assert torch.equal(torch.get_rng_state(), end)
    assert all(tensor.is_meta for tensor in everything(deferred.model).values())
    return deferred


@pytest.mark.parametrize("name", BUILDS)
def test_bits_generator_and_ties_are_those_of_an_ordinary_build(name: str) -> None:
    assert check(BUILDS[name]).why == ""


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, bf16", "bert"])
def test_models_of_transformers(name: str) -> None:
    assert check(transformers_models()[name]).why == ""


class Anything(nn.Module):
    """Some program over a few tensors that overwrite, read and copy each other, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        tensors = [nn.Parameter(torch.empty(6, 6).fill_(float(n))) for n in range(4)]
        generator = torch.Generator().manual_seed(seed)
        saved = torch.get_rng_state()

        def value_decides(a: Tensor, b: Tensor) -> None:
            (a if a.sum().item() > b[0, 0].item() else b).uniform_()

        def replace(a: Tensor, b: Tensor) -> None:
            a.data = torch.randn_like(a) + b

        steps: list[Callable[[Tensor, Tensor], object]] = [
            lambda a, b: a.normal_(),
            lambda a, b: a.normal_(generator=generator),
            lambda a, b: a[choose.randrange(6)].uniform_(),
            lambda a, b: a[:, ::2].normal_(),
            lambda a, b: a.t().random_(0, 9),
            lambda a, b: a.zero_(),
            lambda a, b: a.mul_(1.5),
            lambda a, b: a.add_(b, alpha=0.5),
            lambda a, b: a.copy_(b),
            lambda a, b: a.copy_(b.t()),
            lambda a, b: a.copy_((a @ b).tanh()),
            lambda a, b: a[1:].copy_(b[:-1].clone()),
            lambda a, b: a.index_fill_(0, torch.randperm(6)[:2], 0.25),
            lambda a, b: a.masked_fill_(b > 1, 0.5),
            lambda a, b: a.add_(F.dropout(b, 0.5)),
            lambda a, b: torch.manual_seed(choose.randrange(3)),
            lambda a, b: torch.set_rng_state(saved),
            value_decides,
            replace,
        ]
        with torch.no_grad():
            for _ in range(choose.randrange(5, 40)):
                choose.choice(steps)(*choose.sample(tensors, 2))
        self.tensors = nn.ParameterList(tensors)


@pytest.mark.parametrize("seed", range(60))
def test_any_program(seed: int) -> None:
    assert check(lambda: Anything(seed)).why == ""


# --- what cannot be put off


class Address(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.address = self.weight.data_ptr()


class Stubborn(nn.Linear):
    """Goes on after an error."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        try:
            self.address = self.weight.data_ptr()
        except Exception:
            self.address = None


class Viewed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.row = self.weight.detach()[0]


class Written(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight.data.numpy()[0] = random.random() + np.random.rand()


class Sparse(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight.data.copy_(torch.eye(3).to_sparse().mul(2).to_dense())


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight_ih_l0.data_ptr()


@pytest.mark.parametrize("build", [Address, Stubborn, Viewed, Written, Sparse, Recurrent])
def test_what_cannot_be_put_off_is_built_and_says_why(build: Build) -> None:
    def repeatable() -> nn.Module:
        return build()

    python, numpy = random.getstate(), np.random.get_state()
    torch.manual_seed(3)
    ordinary = repeatable()
    end = torch.get_rng_state()
    consumed = random.random()
    random.setstate(python)
    np.random.set_state(numpy)
    torch.manual_seed(3)
    deferred = record(repeatable)
    assert deferred.whole
    assert len(deferred.why) > 20
    assert random.random() == consumed
    assert_same(deferred.materialize(lambda name, whole: whole.clone()), ordinary)
    assert torch.equal(torch.get_rng_state(), end)
    assert all(tensor.is_meta for tensor in everything(deferred.model).values())


def test_memory_of_others_is_written_once_and_for_real() -> None:
    counter = torch.zeros(3)

    def build() -> nn.Module:
        counter.add_(1)
        return nn.Linear(3, 3)

    deferred = record(build)
    assert "writes to memory outside of the model" in deferred.why
    assert counter.tolist() == [1, 1, 1]


def test_errors_of_the_build_come_through() -> None:
    def build() -> nn.Module:
        nn.Linear(3, 3)(torch.zeros(2, 4))
        raise AssertionError("not reached")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        record(build)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: 3, "not a torch.nn.Module"),
        (lambda: nn.LazyLinear(3), "its shape is not known"),
        (lambda: nn.Linear(3, 3, device="meta"), "no values"),
    ],
)
def test_what_is_no_model_with_values_is_refused(build: Build, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        record(build)


# --- what is kept


def test_a_part_is_kept_and_a_view_does_not_hold_the_whole() -> None:
    torch.manual_seed(3)
    ordinary = mlp()
    torch.manual_seed(3)
    kept = record(mlp).materialize(lambda name, whole: whole[1:3] if name.endswith("weight") else None)
    assert list(kept) == ["0.weight", "2.weight"]
    for name, part in kept.items():
        assert torch.equal(part, everything(ordinary)[name][1:3])
        assert part.untyped_storage().nbytes() == part.numel() * part.itemsize


def test_every_tensor_is_asked_for_once_under_its_first_name() -> None:
    asked: list[str] = []
    record(Tied).materialize(lambda name, whole: asked.append(name))
    assert sorted(asked) == sorted(everything(Tied()))


def spoil(_: str, whole: Tensor) -> Tensor:
    """Keeps a copy and leaves nothing of what it was given."""
    kept = whole.clone()
    whole.zero_()
    return kept


@pytest.mark.parametrize("name", ["two phases", "reads", "seeds", "buffers", "legacy"])
def test_it_can_be_materialised_again(name: str) -> None:
    deferred = record(BUILDS[name])
    first = {name: bits(kept).clone() for name, kept in deferred.materialize(spoil).items()}
    second = deferred.materialize(spoil)
    assert all(torch.equal(first[name], bits(second[name])) for name in first)


def test_a_generator_of_somebody_else_ends_where_it_should() -> None:
    generator = torch.Generator().manual_seed(8)

    def build() -> nn.Module:
        model = nn.Linear(5, 5)
        nn.init.normal_(model.weight, generator=generator)
        return model

    torch.manual_seed(3)
    ordinary, end = build(), generator.get_state()
    torch.manual_seed(3)
    generator.manual_seed(8)
    deferred = record(build)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(8).get_state())
    assert_same(deferred.materialize(lambda name, whole: whole), ordinary)
    assert torch.equal(generator.get_state(), end)


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mask = torch.triu(torch.full((4, 4), -math.inf), 1)
        self.some = {"a": torch.arange(3), "b": [1]}
        self.many = [torch.randn(2), torch.tensor([5.0])]
        self.register_buffer("rates", torch.rand(3))
        self.original = self.rates


def test_tensors_beside_the_parameters_are_put_in_place() -> None:
    torch.manual_seed(3)
    ordinary = Beside()
    torch.manual_seed(3)
    deferred = record(Beside)
    deferred.materialize(lambda name, whole: None)
    model = deferred.model
    found = (model.mask, model.some["a"], *model.many, model.original)
    for one, other in zip(found, (ordinary.mask, ordinary.some["a"], *ordinary.many, ordinary.original), strict=True):
        assert torch.equal(one, other)


def test_recording_leaves_nothing_behind() -> None:
    record(Reads)
    assert torch.zeros(2).device.type == "cpu"
    assert not torch.overrides._is_torch_function_mode_enabled()
    assert torch.get_default_dtype() is torch.float32


# --- memory


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that torch's allocator held at once, over what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def deep() -> nn.Module:
    """32 layers; every phase comes back to all of them."""
    layers = [nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48), nn.LayerNorm(48)) for _ in range(32)]
    model = nn.Sequential(nn.Embedding(100, 48), *layers)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.02)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
        for layer in layers:
            nn.init.ones_(layer[3].weight)
            layer[0].weight.add_(torch.eye(192, 48))
    return model


def deep_redrawn() -> nn.Module:
    """Reads what it drew, for every layer."""
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(32)))
    for layer in model:
        nn.init.trunc_normal_(layer.weight, std=0.5)
    return model


@pytest.mark.parametrize(("build", "temporaries"), [(deep, 3), (deep_redrawn, 6)])
def test_memory_holds_what_is_kept_and_one_tensor(build: Build, temporaries: int) -> None:
    sizes = [tensor.numel() * tensor.itemsize for tensor in everything(build()).values()]
    found: list[DeferredModel] = []
    assert peak_bytes(lambda: found.append(record(build))) < 6 * max(sizes)
    kept: dict[str, Tensor] = {}
    used = peak_bytes(lambda: kept.update(found[0].materialize(lambda name, whole: whole[: len(whole) // 4].clone())))
    held = sum(tensor.numel() * tensor.itemsize for tensor in kept.values())
    assert held == sum(sizes) // 4
    assert used <= held + temporaries * max(sizes)
    assert peak_bytes(build) > held + 3 * temporaries * max(sizes)  # the measure sees the whole model
