"""A distributed optimizer takes the step that plain PyTorch takes on the samples of all workers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono.horovod as hvd
from tests.horovod.workers import over
from tests.trainer.small_loops import MAKERS, SHARE, STEPS, loss_of, net, samples
from unisono import Cast, Exact, PowerSGD, TopK
from unisono.compress import Span
from unisono.sync.adasum import combined


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def share(step: int) -> tuple[Tensor, Tensor]:
    x, y = samples(step, hvd.size())
    own = slice(hvd.rank() * SHARE, (hvd.rank() + 1) * SHARE)
    return x[own], y[own]


def distributed(maker: str, **options: Any) -> Tensor:
    """Weights after `STEPS` steps on this worker's samples."""
    model = net()
    passes = options.get("backward_passes_per_step", 1)
    if options.get("groups") == "lists":
        options["groups"] = [list(model.parameters())[:2], list(model.parameters())[4:]]
    optimizer = hvd.DistributedOptimizer(MAKERS[maker](model.parameters()), model.named_parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = share(step)
        for xs, ys in zip(x.chunk(passes), y.chunk(passes)):
            loss_of(model, xs, ys).backward()
        optimizer.step()
        scheduler.step()
    return weights(model)


def plain(size: int, maker: str, passes: int = 1, factor: float = 1.0, clip: float | None = None) -> Tensor:
    """The same in PyTorch: the sum over passes of the mean over workers, times `factor`."""
    model = net()
    optimizer = MAKERS[maker](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (t.view(size, passes, SHARE // passes, -1) for t in samples(step, size))
        for worker in range(size):
            for xs, ys in zip(x[worker], y[worker]):
                (loss_of(model, xs, ys) * factor / size).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return weights(model)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"groups": 2},
    {"groups": "lists"},
    {"backward_passes_per_step": 2},
    {"backward_passes_per_step": 2, "groups": 1},
    {"gradient_predivide_factor": 2.0},
    {"op": hvd.Sum},
    {"compression": Cast()},
    {"compression": Exact()},
    {"compression": Exact(), "groups": 2, "op": hvd.Sum},
]


def options_change_nothing_but_the_exchange() -> None:
    for maker in MAKERS:
        for options in OPTIONS:
            factor = float(hvd.size()) if options.get("op") == hvd.Sum else 1.0
            expected = plain(hvd.size(), maker, options.get("backward_passes_per_step", 1), factor)
            torch.testing.assert_close(distributed(maker, **options), expected, msg=str(options))
        half = distributed(maker, compression=hvd.Compression.fp16)
        torch.testing.assert_close(half, plain(hvd.size(), maker), rtol=0.02, atol=0.02)


def lossy_compressors_keep_workers_equal() -> None:
    for compression in (TopK(0.2), PowerSGD(1), Cast("fp16")):
        own = distributed("sgd", compression=compression)
        assert torch.equal(hvd.broadcast(own, 0), own)
        assert not torch.equal(own, plain(hvd.size(), "sgd"))


def gradients_can_be_changed_before_the_step() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *share(step)).backward()
        with pytest.raises(AssertionError, match="while gradients are in flight"):
            optimizer.zero_grad()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        scheduler.step()
    torch.testing.assert_close(weights(model), plain(hvd.size(), "sgd", clip=0.05))
    loss_of(model, *share(0)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="gradients are reduced twice"):
        optimizer.step()


def closures_see_reduced_gradients() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), model.named_parameters())
    single = net()
    reference = torch.optim.LBFGS(single.parameters(), max_iter=3)

    def closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        # The search depends on the loss, which has to be that of all workers.
        return hvd.allreduce(loss.detach()) if model is not single else loss

    for step in range(2):
        optimizer.step(functools.partial(closure, model, optimizer, *share(step)))
        reference.step(functools.partial(closure, single, reference, *samples(step, hvd.size())))
    torch.testing.assert_close(weights(model), weights(single), rtol=1e-4, atol=1e-4)


def parameters_without_gradient_take_part() -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)])
    model[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), groups=2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    before = [weights(each) for each in model]
    model[hvd.rank() % 2](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    users = [sum(1 for rank in range(hvd.size()) if rank % 2 == i) / hvd.size() for i in range(2)]
    for each, start, part in zip(model, before, [*users, 0.0]):
        torch.testing.assert_close(weights(each), start - part)


def sparse_gradients_are_added_up() -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True)
        start, rows = table.weight.detach().clone(), torch.tensor([1, 1, 2 + hvd.rank()])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense)
        table(rows).sum().backward()
        optimizer.step()
        expected = torch.zeros(10, 3)
        expected[1] = 2.0
        expected[2 : 2 + hvd.size()] += 1.0 / hvd.size()
        torch.testing.assert_close(table.weight.detach(), start - expected)


def adasum_reduces_steps() -> None:
    model, own = net(), net()
    optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters(), op=hvd.Adasum)
    alone = MAKERS["sgd"](own.parameters())
    loss_of(own, *share(0)).backward()
    start = [p.detach().clone() for p in own.parameters()]
    alone.step()
    changes = [list(hvd.allgather((p.detach() - s).unsqueeze(0))) for p, s in zip(own.parameters(), start)]
    loss_of(model, *share(0)).backward()
    optimizer.step()
    for parameter, first, nodes in zip(model.parameters(), start, changes):
        span = Span("", first.shape, first.stride(), 0, first.numel())
        total = functools.reduce(lambda a, b: combined(a, b, [span]), [x.reshape(-1) for x in nodes])
        torch.testing.assert_close(parameter.detach(), first + total.view(first.shape))
    optimizer.synchronize()
    with pytest.raises(AssertionError, match=r"there is no synchronize\(\) to skip"):
        optimizer.skip_synchronize()


def a_process_set_steps_by_itself() -> None:
    pair = hvd.add_process_set([0, 1])
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=pair)
    start = weights(model)
    model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
    optimizer.step()
    step = 0.5 if pair.included() else float(hvd.rank())
    torch.testing.assert_close(weights(model), start - torch.tensor([step, step, 1.0]))
    hvd.remove_process_set(pair)


def more_passes_than_announced_are_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="more backward passes than backward_passes_per_step = 1"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


LAWS = [
    options_change_nothing_but_the_exchange,
    lossy_compressors_keep_workers_equal,
    gradients_can_be_changed_before_the_step,
    closures_see_reduced_gradients,
    parameters_without_gradient_take_part,
    sparse_gradients_are_added_up,
    adasum_reduces_steps,
    more_passes_than_announced_are_refused,
]


def all_laws() -> None:
    warnings.simplefilter("error", DeprecationWarning)
    for law in LAWS:
        law()


@pytest.mark.parametrize("size", [2, 3])
def test_laws(size: int, tmp_path: Path) -> None:
    over(size, tmp_path, all_laws)


def test_a_process_set(tmp_path: Path) -> None:
    over(3, tmp_path, a_process_set_steps_by_itself)


def test_one_worker_steps_as_without() -> None:
    hvd.init()
    try:
        for maker in MAKERS:
            assert torch.equal(distributed(maker), plain(1, maker))
            assert torch.equal(distributed(maker, op=hvd.Adasum), plain(1, maker))
    finally:
        hvd.shutdown()


def test_it_is_an_optimizer_of_the_same_class_with_the_same_state() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss_of(model, *samples(0, 1)).backward()
    optimizer.step()
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert isinstance(wrapped, torch.optim.SGD)
    assert type(wrapped).__name__ == "SGD"
    assert str(wrapped.state_dict()) == str(optimizer.state_dict())
    early.step()
    assert wrapped.param_groups[0]["lr"] == 0.05
    wrapped.load_state_dict(optimizer.state_dict())


REFUSED: list[tuple[Callable[[nn.Module, torch.optim.Optimizer], Any], str]] = [
    (lambda m, o: hvd.DistributedOptimizer(o, list(m.parameters())), "Parameter: is not a pair of name and parameter"),
    (lambda m, o: hvd.DistributedOptimizer(o, [("a", p) for p in m.parameters()]), "a: is the name of several"),
    (lambda m, o: hvd.DistributedOptimizer(o, list(m.named_parameters())[:2]), r"4 parameters .* have none .*: 0.2, 0"),
    (lambda m, o: hvd.DistributedOptimizer(o, backward_passes_per_step=0), "backward_passes_per_step = 0: is less"),
    (lambda m, o: hvd.DistributedOptimizer(o, op=hvd.Sum, gradient_predivide_factor=2.0), "is not for op=Sum"),
    (lambda m, o: hvd.DistributedOptimizer(o, groups=0), "groups = 0: is less than 1"),
    (lambda m, o: hvd.DistributedOptimizer(o, groups=[list(m.parameters())] * 2), "is in two groups"),
    (lambda m, o: hvd.DistributedOptimizer(o, compression="fp16"), r"has no compress\(tensor\)"),
    (lambda m, o: hvd.DistributedOptimizer(o, compression=TopK(), op=hvd.Adasum), "only for means and sums"),
    (lambda m, o: hvd.DistributedOptimizer(o).add_param_group({"params": []}), "parameters cannot be added"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_arguments_are_checked(call: Callable[..., Any], words: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=words):
        call(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_num_groups_is_deprecated() -> None:
    model = net()
    with pytest.warns(DeprecationWarning, match="num_groups= is deprecated"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_groups=2)


def test_casts() -> None:
    x = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    sent, context = hvd.Compression.fp16.compress(x)
    assert sent.dtype == torch.float16
    assert F.mse_loss(hvd.Compression.fp16.decompress(sent, context), x) < 1e-12
    assert hvd.Compression.fp16.compress(torch.tensor([3]))[0].dtype == torch.int64
    assert hvd.Compression.none.compress(x)[0] is x
