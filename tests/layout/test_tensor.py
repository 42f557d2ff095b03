"""A tensor-parallel model computes what the unsplit model computes, and logs what it did not split."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.support.processes import run
from unisono.errors import InvalidInput
from unisono.layout.tensor import TensorPlan, apply, check_heads, derive, user_plan, verify
from unisono.layout.tensor.attention_heads import local_sizes
from unisono.layout.tensor.linear_modules import grouped_rows
from unisono.layout.tensor.row_exchange import RowExchange
from unisono.tasks.builtin.gpt import GPT

STEPS = 10
SHAPES = [(2, 8), (3, 6), (1, 8), (4, 5)]  # of the steps in turn: samples, positions
TOKENS = 64
needs_transformers = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")


class Separate(nn.Module):
    """Attention that names its numbers of heads in every view, and adds to its input."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.n_head, self.keys, self.values = heads, nn.Linear(width, width), nn.Linear(width, width)
        self.queries, self.back = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        k, q, v = (
            m(x).view(n, t, self.n_head, width // self.n_head).transpose(1, 2)
            for m in (self.keys, self.queries, self.values)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.back(y.transpose(1, 2).contiguous().view(n, t, width))


class Fused(nn.Module):
    """Attention that splits one matrix by its width (as nanoGPT does)."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.n_head, self.width = heads, width
        self.all, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        parts = (p.view(n, t, self.n_head, width // self.n_head) for p in self.all(x).split(self.width, dim=2))
        q, k, v = (p.transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, width)
        y = self.back(y)
        y += x
        return y


class Gated(nn.Module):
    """A perceptron whose gate shares one matrix with what it gates."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Tied(nn.Module):
    """Every kind of block, with a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 32, padding_idx=3)
        self.body = nn.Sequential(Separate(), nn.LayerNorm(32), Fused(), nn.LayerNorm(32), Gated())
        self.head = nn.Linear(32, TOKENS)
        self.head.weight = self.tokens.weight
        self.body[0].queries.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(tokens)))


class Convolutional(nn.Module):
    """Nothing in it can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1, 2))
        self.last = nn.Linear(4, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        images = (tokens.float() / TOKENS)[:, None, :, None].expand(-1, -1, -1, 4)
        maps = self.body(images).unflatten(1, (4, -1)).mean(-1)
        return self.last(maps.transpose(1, 2))


class Perceptron(nn.Sequential):
    """Tokens to logits through a perceptron."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(F.one_hot(tokens, TOKENS).float())


class Encoder(nn.Module):
    """torch's own encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.tokens(tokens))


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=tied))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": TOKENS, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}
    rest = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**shape, **rest))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    shape = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**shape, **dropout, intermediate_size=48, max_position_embeddings=16))


def phi3() -> nn.Module:
    """Its own plan puts together what one matrix holds of several kinds, and takes it apart again."""
    from transformers import Phi3Config, Phi3ForCausalLM

    shape = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return Phi3ForCausalLM(Phi3Config(**shape, **heads, pad_token_id=0, eos_token_id=0))


def perceptron() -> nn.Module:
    return Perceptron(nn.Linear(TOKENS, 48), nn.ReLU(inplace=True), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, TOKENS))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "text": GPT(layers=2, width=32, heads=4, context=8).build,
    "tied": Tied,
    "perceptron": perceptron,
    "convolutional": Convolutional,
    "encoder": Encoder,
}
TRANSFORMERS = {"llama": llama, "llama, tied": partial(llama, True), "phi3": phi3, "gpt2": gpt2, "bert": bert}
GIVEN = {
    "text": {
        "blocks.*.query_key_value": "column of thirds",
        "blocks.1.attention.output": "row",
        "blocks.0.*.output": "row",
    },
    "tied": {"body.0.[kqv]*": "column", "body.0.back": "row", "tokens": "vocabulary", "head": "column gathered"},
    "perceptron": {"0": "column gathered", "2": "row scattered", "4": "row scattered"},
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}


def tokens(step: int) -> Tensor:
    return torch.randint(0, TOKENS, SHAPES[step % len(SHAPES)], generator=torch.Generator().manual_seed(step))


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    return (MODELS | TRANSFORMERS)[name]()


def loss(model: nn.Module, step: int) -> Tensor:
    batch = tokens(step)
    output = model(batch)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten() % logits.shape[-1])


def train(model: nn.Module, optimizer: str) -> list[float]:
    """Losses of `STEPS` steps, with an optimizer that sees nothing but plain local tensors."""
    own = dict(model.named_parameters())
    here = {name: nn.Parameter(local(p.detach()), requires_grad=p.requires_grad) for name, p in own.items()}
    steps = OPTIMIZERS[optimizer](p for p in here.values() if p.requires_grad)
    losses = []
    for step in range(STEPS):
        value = loss(model, step)
        value.backward()
        for name, parameter in own.items():
            if parameter.grad is not None:
                here[name].grad = local(parameter.grad)
            parameter.grad = None
        steps.step()
        losses.append(value.item())
    return losses


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def law(rank: int, size: int, path: str, names: list[str], own: bool = True) -> dict[tuple[str, str], dict[str, Any]]:
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("tensor",))
    found = {(name, how): compared(name, how, mesh, own) for name in names for how in OPTIMIZERS}
    dist.destroy_process_group()
    return found


def compared(name: str, optimizer: str, mesh: DeviceMesh, own: bool) -> dict[str, Any]:
    """`own`: the plan that is found, else the one in `GIVEN`."""
    whole, split, sample = build(name), build(name), (tokens(0),)
    plan = derive(split, mesh.size(), sample) if own else user_plan(split, mesh.size(), GIVEN[name], sample)
    apply(split, mesh, plan)
    assert [key for key, _ in split.named_parameters()] == [key for key, _ in whole.named_parameters()]
    off = max(abs(a - b) for a, b in zip(train(whole, optimizer), train(split, optimizer), strict=True))
    weights = 0.0
    plain = hashlib.sha256()
    for (_, ours), (_, theirs) in zip(whole.named_parameters(), split.named_parameters()):
        assert ours.shape == theirs.shape
        assert ours.requires_grad == theirs.requires_grad
        if isinstance(theirs, DTensor):
            weights = max(weights, float((theirs.full_tensor() - ours).detach().abs().max()))
        else:
            plain.update(theirs.detach().numpy().tobytes())
    held = sum(local(p).numel() for p in split.parameters()) / sum(p.numel() for p in whole.parameters())
    return {"plan": plan, "loss": off, "weights": weights, "plain": plain.hexdigest(), "held": held}


def check(results: list[dict[tuple[str, str], dict[str, Any]]]) -> None:
    for case, found in results[0].items():
        assert found["loss"] <= 2e-6, (case, found["loss"])
        assert case[1] != "sgd" or found["weights"] <= 1e-5, (case, found["weights"])
        for other in results[1:]:
            assert other[case]["plan"] == found["plan"], case
            assert other[case]["plain"] == found["plain"], f"{case}: the members' whole parameters drift apart"


def test_two_workers_learn_what_the_whole_model_learns(tmp_path: Path) -> None:
    results = run(2, law, str(tmp_path / "store"), list(MODELS))
    check(results)
    held = {name: results[0][name, "sgd"]["held"] for name in MODELS}
    assert held["text"] < 0.52
    assert held["tied"] < 0.53
    assert held["convolutional"] == 1
    plan = results[0]["tied", "sgd"]["plan"]
    assert set(plan.whole) == {"body.1", "body.3"}
    assert plan.split["body.2.all"] == "column of thirds"
    assert plan.split["body.4.gate_up"] == "column of halves"


@needs_transformers
def test_transformers_models_are_split_as_they_are(tmp_path: Path) -> None:
    results = run(2, law, str(tmp_path / "store"), list(TRANSFORMERS), timeout_seconds=120)
    check(results)
    for name in TRANSFORMERS:
        assert results[0][name, "sgd"]["held"] < 0.6, name
    for name in ("llama", "phi3"):
        plan = results[0][name, "sgd"]["plan"]
        assert plan.split.keys() == plan.because.keys()
        assert set(plan.because.values()) == {"the model's own plan"}
    assert results[0]["phi3", "sgd"]["plan"].split["model.layers.0.self_attn.o_proj"] == "row scattered"


def test_four_workers(tmp_path: Path) -> None:
    results = run(4, law, str(tmp_path / "store"), ["text"])
    check(results)
    assert results[0]["text", "sgd"]["held"] < 0.28


def test_a_plan_that_was_given_is_the_whole_plan(tmp_path: Path) -> None:
    results = run(2, law, str(tmp_path / "store"), list(GIVEN), False)
    check(results)
    for name in GIVEN:
        plan = results[0][name, "sgd"]["plan"]
        assert set(plan.whole.values()) == {"the given plan does not name it"} or not plan.whole
        assert results[0][name, "sgd"]["held"] < 1
    assert results[0]["text", "sgd"]["plan"].split.keys() == {
        f"blocks.{i}.attention.{part}" for i in (0, 1) for part in ("query_key_value", "output")
    }


@pytest.mark.parametrize(
    ("degree", "words", "said"),
    [
        (2, {"9": "row"}, "tensor plan = 9: no module has this name; use names"),
        (2, {"body.0.query": "column"}, "no module has this name; did you mean body.0.queries?"),
        (
            3,
            {"body.4.down": "row"},
            "plan = 'body.4.down': 'row': body.4.down: 64 inputs do not divide by tensor=3; write tensor=4, or omit it",
        ),
        (3, {"body.2.all": "column of thirds"}, "32 outputs in each of its 3 blocks do not divide by tensor=3; write "),
        (3, {"tokens": "vocabulary"}, "64 rows do not divide by tensor=3"),
        (2, {"body.0.*s": "column", "body.0.back": "column"}, "column without a later row layer"),
        (2, {"body.0.*": "column", "body.0.back": "row"}, "body.0.back also fits 'body.0.back': 'row'; name "),
        (
            2,
            {"body.1": "row scattered"},
            "plan = 'body.1': 'row scattered': body.1: a LayerNorm has no matrix to split; change it, or omit it",
        ),
        (2, {"body.4.gate_up": "column", "body.4.down": "row"}, "differs from the whole"),
        (2, {"tokens": "vocabulary"}, "its weight is also used by head, which is not split the same way"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_its_entry(degree: int, words: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        user_plan(build("tied"), degree, words, (tokens(0),))
    assert said in str(caught.value)


def test_where_the_models_own_plan_fails_what_is_found_is_taken() -> None:
    model = build("tied")
    model._tp_plan = {
        "body.0.queries": "rowwise", "body.0.back": "colwise",  # the wrong way round
        "body.2.all": "grouped_gemm",  # not built
        "body.4.gate_up": "colwise_gather_output", "body.4.down": "rowwise_split_input",
    }  # fmt: skip
    plan = derive(model, 2, (tokens(0),))
    assert {plan.split[f"body.0.{name}"] for name in ("keys", "queries", "values")} == {"column"}
    assert plan.because["body.0.back"].startswith("the model's own plan fails: ")
    assert plan.whole["body.2.all"] == 'the model\'s own plan asks for "grouped_gemm", which is not supported'
    assert (plan.split["body.4.gate_up"], plan.split["body.4.down"]) == ("column gathered", "row scattered")
    assert plan.because["body.4.down"] == "the model's own plan"
    assert verify(model, plan, 2, (tokens(0),)).split == plan.split


def test_a_plan_says_why_something_stays_whole() -> None:
    convolutional = derive(Convolutional(), 2, (tokens(0),))
    assert not convolutional.split
    assert set(convolutional.whole) == {"body.0", "body.1", "last"}
    assert "Conv2d" in convolutional.whole["body.0"]
    encoder = derive(Encoder(), 2, (tokens(0),))
    assert {"layer.linear1", "layer.linear2", "tokens"} == set(encoder.split)
    assert "MultiheadAttention" in encoder.whole["layer.self_attn"]
    odd = derive(Separate(36, 3), 2, (torch.randn(2, 5, 36),))
    assert "3 heads" in odd.whole["queries"]
    assert "without a sample input" in derive(Separate(), 2, None).whole["queries"]


def test_verification_leaves_no_trace() -> None:
    model, untouched = build("tied"), build("tied")
    model.train()
    derive(model, 2, (tokens(0),))
    assert all(m.training for m in model.modules())
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [m.n_head for m in (model.body[0], model.body[2])] == [4, 4]
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), untouched.parameters()))


@pytest.mark.parametrize(
    ("plan", "named", "why"),
    [
        ({"0": "row", "2": "column"}, {"0", "2"}, "without a"),
        ({"0": "column", "2": "column", "4": "row"}, {"0", "2", "4"}, "fails"),
        ({"0": "column of thirds", "2": "row"}, {"0", "2"}, "differs"),
        ({"0": "column", "4": "row"}, {"0", "4"}, "fails"),
        ({"1": "column", "2": "row"}, {"1", "2"}, "ReLU"),
        ({"0": "vocabulary"}, {"0"}, "embedding"),
        ({"4": "column gathered"}, set(), ""),
        ({"[02]": "column gathered"}, set(), ""),
        ({"0": "column", "2": "row"}, set(), ""),
    ],
)
def test_verification_names_what_is_wrong_in_a_users_plan(plan: dict[str, str], named: set[str], why: str) -> None:
    verified = verify(perceptron(), TensorPlan.of(plan), 2, (tokens(0),))
    assert set(verified.whole) == named
    assert all(why in sentence for sentence in verified.whole.values())
    assert not named & set(verified.split)
    assert len(verified.split) == (0 if named else 1 if "4" in plan else 2)


def test_a_split_that_changes_only_gradients_is_found() -> None:
    class Blind(nn.Module):
        """Hides half of what the members add to the gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return self.down(y - y.detach() * 0 if y.shape[-1] == 16 else y.detach())

    verified = verify(Blind(), TensorPlan.of({"up": "column", "down": "row"}), 2, (torch.randn(3, 8),))
    assert "gradient differs" in verified.whole["up"]


def test_a_model_without_numbers_gets_the_plan_of_one_that_has_them() -> None:
    for name in ("text", "tied", "encoder"):
        with torch.device("meta"):
            empty = MODELS[name]()
        assert derive(empty, 2, (tokens(0),)) == derive(build(name), 2, (tokens(0),))
        assert all(p.is_meta for p in empty.parameters())


def test_a_copy_of_a_split_model_computes_with_its_own_weights(tmp_path: Path) -> None:
    assert run(1, copied, str(tmp_path / "store")) == [(True, True)]


def copied(rank: int, size: int, path: str) -> tuple[bool, bool]:
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    model = build("text")
    plan = derive(model, 2, (tokens(0),))
    before = loss(model, 0)
    apply(model, DeviceMesh("cpu", [0], mesh_dim_names=("tensor",)), plan)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    kept = torch.allclose(loss(other, 0), before, atol=1e-6)
    moved = loss(model, 0).item() == pytest.approx(math.log(256), abs=1e-6)
    dist.destroy_process_group()
    return kept, moved


def test_words_and_names_are_checked() -> None:
    with pytest.raises(InvalidInput, match="write one of column, row"):
        TensorPlan.of({"0": "diagonal"})
    with pytest.raises(InvalidInput, match="no module has this name"):
        verify(perceptron(), TensorPlan.of({"nine*": "row"}), 2, (tokens(0),))


def test_a_degree_that_cuts_through_heads_is_refused() -> None:
    for model in (
        Separate(36, 6),
        GPT(layers=1, width=36, heads=6).build(),
        nn.TransformerEncoderLayer(36, 6),
    ):
        check_heads(model, 3)
        with pytest.raises(InvalidInput, match=r"tensor = 4: .*6.* tensor must divide 6; write tensor=3") as caught:
            check_heads(model, 4)
        assert caught.value.field == "tensor"
    check_heads(Convolutional(), 7)


def test_sizes_are_divided_where_the_heads_are_whatever_the_number_of_samples() -> None:
    for degree in (2, 3, 4):
        for samples in range(1, 9):
            for positions in range(1, 9):
                heads, width = 12, 6 if degree != 3 else 5
                n, t, h = samples, positions, heads // degree
                assert local_sizes((n, t, h, width), (n, t, heads * width), degree) == (n, t, h * width)
                assert local_sizes((n, t, h * width), (n, t, heads, width), degree) == (n, t, h, width)
                assert local_sizes((n * t, h * width), (n, t, heads, width), degree) == (n, t, h, width)
                assert local_sizes((n, t, h, width), (n * t, heads * width), degree) == (n * t, h * width)
    assert local_sizes((5, 3), (5, 9), 2) is None


@pytest.mark.parametrize(("groups", "degree"), [(3, 2), (3, 3), (3, 4), (2, 2), (2, 4), (1, 4)])
def test_rows_change_places_exactly(groups: int, degree: int) -> None:
    outputs = groups * degree * 4
    members = [RowExchange(outputs, groups, degree, member) for member in range(degree)]
    share = outputs // degree
    for user, mine in enumerate(members):
        arrived = []
        for holder, theirs in enumerate(members):
            sent = (theirs.order + holder * share).split(theirs.sent)[user]
            assert len(sent) == mine.received[holder]
            arrived.append(sent)
        assert torch.equal(torch.cat(arrived), grouped_rows(outputs, groups, degree, user))
    assert all(sorted(each.order.tolist()) == list(range(share)) for each in members)
    assert math.prod(len(each.sent) for each in members) == degree**degree


@needs_transformers
def test_the_models_own_plan_is_taken() -> None:
    own = TensorPlan.from_model(llama())
    assert own is not None
    assert own.split["model.layers.*.self_attn.o_proj"] == "row"
    assert own.split["lm_head"] == "column gathered"
    assert TensorPlan.from_model(gpt2()) is None
    assert TensorPlan.from_model(perceptron()) is None
