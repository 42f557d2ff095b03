"""Models of many kinds: normalization, recurrence, shared and unused parameters, reparametrizations, number formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.end_to_end.loop_cases.environments import Environment
from tests.end_to_end.loop_cases.fragments import (
    CLASSES,
    STEPS,
    WORDS,
    adam,
    cross_entropy,
    mse,
    net,
    numbers,
    samples,
    seeded,
    sgd,
    train,
    weights,
)
from tests.end_to_end.loop_cases.table import Expected, Numbers, case

ABSENT, EITHER = Expected.ABSENT, Expected.EITHER


# ---- normalization


def normalized() -> nn.Module:
    """A network with batch normalization."""
    return seeded(0, lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))


def share_mse(env: Environment) -> Callable[..., Tensor]:
    """The squared error, where a layer computes statistics over each share by itself."""
    return lambda model, x, y: env.share_mean(lambda _, x, y: mse(model, x, y), x, y)


@case()
def batchnorm(env: Environment) -> Numbers:
    """Each worker, or micro-batch, has batch statistics of its own. Compared are weights, not running statistics."""
    model = normalized()
    model, optimizer = env.bind(model, sgd(model))
    train(env, model, optimizer, loss_of=share_mse(env))
    return weights(model)


@case()
def batchnorm_running_statistics_agree(env: Environment) -> Numbers:
    """After training, all workers have the same running statistics."""
    model = normalized()
    model, optimizer = env.bind(model, sgd(model))
    train(env, model, optimizer, loss_of=share_mse(env))
    statistics = float(torch.cat([model[1].running_mean, model[1].running_var]).square().sum())
    return {**weights(model), "difference": torch.tensor(abs(statistics - env.mean(statistics)))}


@case()
def batchnorm_frozen(env: Environment) -> Numbers:
    """Batch normalization in evaluation mode, while the rest trains."""
    model = normalized()
    model, optimizer = env.bind(model, sgd(model))
    model[1].eval()
    return train(env, model, optimizer)


@case()
def batchnorm_without_running_statistics(env: Environment) -> Numbers:
    """Statistics of each batch alone, also in evaluation."""
    model = seeded(0, lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=False)))
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return env.share_mean(lambda _, x, y: F.mse_loss(model(x).tanh().mean(1, keepdim=True), y), x, y)

    return train(env, model, optimizer, loss_of=loss_of)


@case()
def other_normalizations(env: Environment) -> Numbers:
    """Layer, group, instance and local response normalization, and RMSNorm."""
    model = seeded(0, lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.InstanceNorm2d(4, affine=True), nn.LocalResponseNorm(2),
        nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 8), nn.RMSNorm(8), nn.Linear(8, CLASSES),
    ))  # fmt: skip
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, loss_of=cross_entropy, data=samples("image", "label"))


@case()
def dropout_with_given_masks(env: Environment) -> Numbers:
    """Dropout whose mask belongs to the sample."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.mse_loss(model[2](model[:2](x) * mask), y)

    return train(env, model, optimizer, loss_of=loss_of, data=samples("x", "y", "mask"))


# ---- convolutions, attention, recurrence


@case()
def convolutions(env: Environment) -> Numbers:
    """A small image classifier in channels-last format, with a residual block and pooling."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.Flatten(),
                          nn.Linear(6, CLASSES)).double().to(memory_format=torch.channels_last)  # fmt: skip
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, loss_of=cross_entropy, data=samples("image", "label"))


@case()
def transformer(env: Environment) -> Numbers:
    """A transformer encoder over tokens, without dropout."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, 8), nn.Parameter(torch.zeros(7, 8))
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.encoder(self.words(tokens) + self.places).mean(1))

    model = seeded(0, Model)
    model, optimizer = env.bind(model, adam(model))
    return train(env, model, optimizer, loss_of=cross_entropy, data=samples("tokens", "label"))


class Recurrent(nn.Module):
    """A recurrent network that is given its state, and returns it."""

    def __init__(self, kind: type[nn.Module] = nn.GRU) -> None:
        super().__init__()
        self.cell, self.head = kind(5, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        hidden, state = self.cell(x, state)
        return self.head(hidden[:, -1]), state


@case()
def recurrent(env: Environment) -> Numbers:
    """A recurrent network over whole series."""
    model = seeded(0, Recurrent)
    model, optimizer = env.bind(model, adam(model))
    return train(env, model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x)[0], y), data=samples("series", "y"))


@case(steps=ABSENT, why="one global batch takes two steps")
def truncated_backpropagation(env: Environment) -> Numbers:
    """Each half of a series takes a step; the detached state is handed on."""
    model = seeded(0, lambda: Recurrent(nn.LSTM))
    model, optimizer = env.bind(model, adam(model))
    for batch in env.batches(samples("series", "y"), STEPS):
        for series, y in batch:
            state = None
            for part in series.chunk(2, dim=1):
                optimizer.zero_grad()
                output, state = model(part, state)
                F.mse_loss(output, y).backward()
                state = tuple(each.detach() for each in state)
                optimizer.step()
    return numbers(model, optimizer)


@case(steps=ABSENT, why="world.steps gives samples, and not parts of streams")
def state_carried_across_steps(env: Environment) -> Numbers:
    """Twelve streams are divided among the workers, and their states live as long as the loop."""
    data = samples("series").tensors[0].view(12, 4, 6, 5)
    streams, state = env.mine(data), None
    model = seeded(0, Recurrent)
    model, optimizer = env.bind(model, adam(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        output, state = model(streams[:, step], None if state is None else state.detach())
        F.mse_loss(output, streams[:, step, -1, :1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return numbers(model, optimizer)


@case()
def unrolled_in_time(env: Environment) -> Numbers:
    """A cell is called step by step, and its losses add up before one backward pass."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": nn.LSTMCell(5, 6), "head": nn.Linear(6, 1)}).double()
    cell, head, optimizer = env.bind(model["cell"], model["head"], adam(model))
    for batch in env.batches(samples("series", "y"), STEPS):
        optimizer.zero_grad()
        for series, y in batch:
            state, losses = None, []
            for x in series.unbind(1):
                state = cell(x, state)
                losses.append(F.mse_loss(head(state[0]), y))
            torch.stack(losses).mean().backward()
        optimizer.step()
    return numbers(cell, head, optimizer)


# ---- shared, unused and conditional parameters


@case()
def tied_weights(env: Environment) -> Numbers:
    """A language model whose output layer has the embedding's weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, WORDS)).double()
    model[3].weight = model[0].weight
    model, optimizer = env.bind(model, adam(model))
    return train(
        env, model, optimizer, data=samples("tokens"),
        loss_of=lambda m, tokens: F.cross_entropy(m(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()),
    )  # fmt: skip


@case()
def shared_module(env: Environment) -> Numbers:
    """One layer in three places."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(5, 8), layer, nn.Tanh(), layer, nn.Tanh(), layer, nn.Linear(8, 1)).double()
    return train(env, *env.bind(model, sgd(model)))


@case()
def two_models_share_a_trunk(env: Environment) -> Numbers:
    """Two networks that are both bound have their first layers in common."""
    trunk = net(5, 8)
    one, two = nn.Sequential(trunk, *net(8, 1, seed=1)), nn.Sequential(trunk, *net(8, 1, seed=2))
    optimizer = torch.optim.SGD([*one.parameters(), *two[1].parameters()], lr=0.1)
    one, two, optimizer = env.bind(one, two, optimizer)
    for batch in env.batches(samples("x", "y", "other"), STEPS):
        optimizer.zero_grad()
        for x, y, other in batch:
            (mse(one, x, y) + mse(two, x, other)).backward()
        optimizer.step()
    return numbers(one, two, optimizer)


class Branches(nn.Module):
    """Two branches, of which a call takes the one that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branches = nn.Linear(5, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.first(x).tanh())


@case(find_unused=True)
def parameters_never_used(env: Environment) -> Numbers:
    """A branch that no worker takes has no gradient, and weight decay does not change it."""
    model = seeded(0, Branches)
    model, optimizer = env.bind(model, sgd(model, weight_decay=0.1))
    found = train(env, model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x, 0), y))
    return {**found, **numbers(untouched=model.branches[1].weight.grad is None)}


@case(find_unused=True)
def branch_of_the_step(env: Environment) -> Numbers:
    """All workers take one branch in even steps, the other in odd ones."""
    model = seeded(0, Branches)
    model, optimizer = env.bind(model, sgd(model, weight_decay=0.1))
    for step, batch in enumerate(env.batches(samples("x", "y"), STEPS)):
        optimizer.zero_grad()
        for x, y in batch:
            F.mse_loss(model(x, step % 2), y).backward()
        optimizer.step()
    return numbers(model, optimizer)


@case(find_unused=True)
def branch_of_the_share(env: Environment) -> Numbers:
    """Each share takes a branch by its data: on a worker without a branch, its gradient counts as zero."""
    model = seeded(0, Branches)
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return env.share_mean(lambda _, x, y: F.mse_loss(model(x, int(x.sum() > 0)), y), x, y)

    return train(env, model, optimizer, loss_of=loss_of)


@case(find_unused=True)
def experts(env: Environment) -> Numbers:
    """Each sample goes to one of four experts; some have no sample on a worker."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(5, 4), nn.ModuleList(nn.Linear(5, 1) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            scores, output = self.gate(x).softmax(1), x.new_zeros(len(x), 1)
            chosen = scores.argmax(1)
            for number, expert in enumerate(self.experts):
                if (mine := (chosen == number).nonzero().flatten()).numel():
                    output = output.index_add(0, mine, expert(x[mine]) * scores[mine, number, None])
            return output

    model = seeded(0, Model)
    return train(env, *env.bind(model, adam(model)))


@case(steps=ABSENT, why="world.steps decides what a worker computes", find_unused=True)
def worker_without_a_backward_pass(env: Environment) -> Numbers:
    """A share whose loss is small counts as zero, and has no backward pass at all."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad(set_to_none=False)
        for x, y in batch:
            shares = env.shares(x, y)
            losses = [mse(model, *share) for number, share in shares if number == 0]
            if losses:
                (losses[0] / len(shares)).backward()
        optimizer.step()
    return numbers(model, optimizer)


# ---- parameters of other kinds


@case()
def sparse_embedding_sgd(env: Environment) -> Numbers:
    """An embedding with sparse gradients, and SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 6, sparse=True), nn.Flatten(), nn.Linear(42, CLASSES)).double()
    model, optimizer = env.bind(model, sgd(model, momentum=0.0))
    return train(env, model, optimizer, loss_of=cross_entropy, data=samples("tokens", "label"))


@case()
def sparse_embedding_adam(env: Environment) -> Numbers:
    """SparseAdam for the embedding, Adam for the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 6, sparse=True), nn.Linear(6, CLASSES)).double()
    table = torch.optim.SparseAdam(list(model[0].parameters()), lr=0.02)
    model, table, rest = env.bind(model, table, adam(model[1]))
    return train(env, model, table, rest, loss_of=cross_entropy, data=samples("tokens", "label"))


@case(own=EITHER, steps=EITHER, why="complex numbers may be refused")
def complex_numbers(env: Environment) -> Numbers:
    """A complex matrix between two real ones."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 8, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)
            self.turn = nn.Parameter(torch.eye(4, dtype=torch.complex128) * 1j)

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.view_as_complex(self.first(x).view(-1, 4, 2)) @ self.turn
            return self.last(turned.abs())

    torch.manual_seed(0)
    model = Model()
    return train(env, *env.bind(model, sgd(model)))


@case(tolerance=0.05)
def bfloat16_model(env: Environment) -> Numbers:
    """All weights in bfloat16."""
    model = net().bfloat16()
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x.bfloat16()).float(), y.float()))


@case(tolerance=1e-4)
def single_precision(env: Environment) -> Numbers:
    """The usual number format."""
    model = net(5, 16, 16, 1).float()
    model, optimizer = env.bind(model, adam(model))
    return train(env, model, optimizer, loss_of=lambda m, x, y: F.mse_loss(m(x.float()), y.float()))


@case(tolerance=1e-4)
def mixed_number_formats(env: Environment) -> Numbers:
    """One layer in single precision, one in double."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 1, dtype=torch.float64)])
    low, high, optimizer = env.bind(*model, sgd(model))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            F.mse_loss(high(low(x.float()).tanh().double()), y).backward()
        optimizer.step()
    return numbers(low, high, optimizer)


class OddParameters(nn.Module):
    """A scalar, an empty one, one that is a transposed view, and some in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(1, 8).t())
        self.listed = nn.ParameterList([torch.zeros(1), torch.ones(8)])
        self.named = nn.ParameterDict({"shift": torch.zeros(8)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.first(x) * self.listed[1] + self.named["shift"]).tanh()
        return self.scale * (hidden @ self.turned) + self.listed[0] + self.empty.sum()


@case()
def odd_parameters(env: Environment) -> Numbers:
    """Parameters of unusual shapes and containers."""
    model = seeded(0, OddParameters)
    return train(env, *env.bind(model, sgd(model)))


@case()
def inputs_and_outputs_in_containers(env: Environment) -> Numbers:
    """The model takes a dictionary and keywords, and returns a dictionary with its loss."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, inputs: dict[str, Tensor], *, target: Tensor | None = None) -> dict[str, Any]:
            output = self.net(inputs["x"])
            return {"output": [output], "loss": None if target is None else F.mse_loss(output, target)}

    model = Model()
    model, optimizer = env.bind(model, sgd(model))
    return train(env, model, optimizer, loss_of=lambda m, x, y: m({"x": x}, target=y)["loss"])


# ---- reparametrizations


@case()
def weight_norm(env: Environment) -> Numbers:
    """Length and direction of a weight are parameters of their own."""
    model = net(5, 8, 8, 1)
    parametrizations.weight_norm(model[2])
    return train(env, *env.bind(model, sgd(model)))


@case()
def spectral_norm(env: Environment) -> Numbers:
    """A weight is divided by an estimate of its norm, which buffers keep."""
    model = net(5, 8, 8, 1)
    torch.manual_seed(3)
    parametrizations.spectral_norm(model[2])
    return train(env, *env.bind(model, sgd(model)))


@case()
def orthogonal(env: Environment) -> Numbers:
    """A weight that stays orthogonal."""
    model = net(5, 8, 8, 1)
    torch.manual_seed(3)
    parametrizations.orthogonal(model[2])
    return train(env, *env.bind(model, sgd(model)))


class Symmetric(nn.Module):
    """The symmetric part of a square matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x.t()) / 2


@case()
def parametrization_of_ones_own(env: Environment) -> Numbers:
    """A symmetric weight, computed once in each pass."""
    model = net(5, 8, 8, 1)
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    model, optimizer = env.bind(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            return mse(model, x, y)

    return train(env, model, optimizer, loss_of=loss_of)


class LowRank(nn.Module):
    """A frozen layer, and a trained product of two small matrices beside it (LoRA)."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5))
        self.up = nn.Parameter(torch.zeros(8, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


@case()
def low_rank_adapters(env: Environment) -> Numbers:
    """LoRA: most of the model is frozen."""
    model = net()
    model[0] = LowRank(model[0])
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return train(env, *env.bind(model, optimizer))


@case()
def learned_loss_weights(env: Environment) -> Numbers:
    """The loss has parameters: the weights of two tasks, in a module of their own."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logs = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return ((-self.logs).exp() * torch.stack([first, second]) + self.logs).sum()

    model, loss = net(5, 8, 2), Weighted()
    model, loss, optimizer = env.bind(model, loss, adam(model, loss))
    for batch in env.batches(samples("x", "y", "other"), STEPS):
        optimizer.zero_grad()
        for x, y, other in batch:
            output = model(x)
            loss(F.mse_loss(output[:, :1], y), F.mse_loss(output[:, 1:], other)).backward()
        optimizer.step()
    return numbers(model, loss, optimizer)


@case(steps=EITHER, why="a container has no forward pass of its own")
def modules_in_a_container(env: Environment) -> Numbers:
    """What is bound is a `ModuleDict`, whose members the loop calls."""
    modules = nn.ModuleDict({"first": net(5, 8), "second": net(8, 1, seed=1)})
    modules, optimizer = env.bind(modules, adam(modules))
    for batch in env.batches(samples("x", "y"), STEPS):
        optimizer.zero_grad()
        for x, y in batch:
            F.mse_loss(modules["second"](modules["first"](x).tanh()), y).backward()
        optimizer.step()
    return numbers(modules, optimizer)


@case()
def other_methods_of_the_model(env: Environment) -> Numbers:
    """The loop calls `encode` and `decode`, and never the model itself."""

    class AutoEncoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = net(5, 3), net(3, 5, seed=1)

        def encode(self, x: Tensor) -> Tensor:
            return self.into(x).tanh()

        def decode(self, code: Tensor) -> Tensor:
            return self.out(code)

    model = AutoEncoder()
    model, optimizer = env.bind(model, adam(model))
    return train(env, model, optimizer, loss_of=lambda m, x: F.mse_loss(m.decode(m.encode(x)), x), data=samples("x"))


@case(slow=True)
def compiled_before_bind(env: Environment) -> Numbers:
    """`torch.compile`, and what it returns is bound."""
    model = torch.compile(net(), backend="aot_eager")
    return train(env, *env.bind(model, sgd(model)))


@case(slow=True)
def compiled_after_bind(env: Environment) -> Numbers:
    """The bound model is compiled."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    compiled = torch.compile(model, backend="aot_eager")
    train(env, compiled, optimizer)
    return numbers(model, optimizer)


@case(slow=True)
def compiled_in_place(env: Environment) -> Numbers:
    """`model.compile()`, and a compiled loss."""
    model = net()
    model, optimizer = env.bind(model, sgd(model))
    model.compile(backend="aot_eager")
    loss = torch.compile(F.mse_loss, backend="aot_eager")
    return train(env, model, optimizer, loss_of=lambda m, x, y: loss(m(x), y))
