"""From the third step on, a distributed optimizer exchanges gradients without negotiation, with the same results."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono.horovod as hvd
from tests.horovod.workers import Warnings, initialized, over
from tests.support.processes import start
from tests.trainer.small_loops import MAKERS, STEPS, loss_of, net, samples
from unisono import Cast, Exact, TopK
from unisono.horovod import negotiation
from unisono.horovod.participant import Participant, current
from unisono.horovod.requests import ALLREDUCE, FIX_ORDER

NEGOTIATED: dict[str, Any] = {"groups": 1}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@contextmanager
def submissions() -> Iterator[list[str]]:
    """The verbs of what is submitted."""
    found: list[str] = []
    submit = Participant.submit

    def noted(own: Participant, verb: str, *args: Any, **fields: Any) -> Any:
        found.append(verb)
        return submit(own, verb, *args, **fields)

    Participant.submit = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Participant.submit = submit  # type: ignore[method-assign]


def wrapped(model: nn.Module, maker: str = "sgd", **options: Any) -> Any:
    return hvd.DistributedOptimizer(MAKERS[maker](model.parameters()), model.named_parameters(), **options)


def take_step(model: nn.Module, optimizer: Any, step: int = 0) -> None:
    """A step on this worker's own samples."""
    optimizer.zero_grad()
    loss_of(model, *samples(100 * step + hvd.rank(), 1)).backward()
    optimizer.step()


def until_fixed(model: nn.Module, **options: Any) -> Any:
    """An optimizer that has taken the two steps before its gradients are not negotiated any more."""
    optimizer = wrapped(model, **options)
    for step in range(2):
        take_step(model, optimizer, step)
    return optimizer


OPTIONS: list[tuple[bool, dict[str, Any]]] = [
    (True, {}),
    (True, {"op": hvd.Sum}),
    (True, {"sparse_as_dense": True}),
    (True, {"backward_passes_per_step": 1}),
    (True, {"compression": hvd.Compression.fp16}),
    (True, {"compression": Cast("bf16")}),
    (True, {"compression": Exact(), "op": hvd.Sum}),
    (False, {"compression": TopK(0.2)}),
    (False, {"groups": 2}),
    (False, {"gradient_predivide_factor": 2.0}),
    (False, {"op": hvd.Adasum}),
]


def usual_options_need_no_negotiation() -> None:
    for fixed, options in OPTIONS:
        model = net()
        optimizer = until_fixed(model, **options)
        with submissions() as found:
            take_step(model, optimizer, 2)
        assert (found == []) == fixed, (options, found)


def a_pair_negotiates() -> None:
    pair = hvd.add_process_set([0, 1])
    model = net()
    optimizer = until_fixed(model, process_set=pair)
    with submissions() as found:
        take_step(model, optimizer, 2)
    assert (ALLREDUCE in found) == (hvd.rank() < 2)
    hvd.remove_process_set(pair)


def trained_unevenly(**options: Any) -> Tensor:
    """Weights of two models, after two epochs in which each worker has more steps than the one before it."""
    models = net(1), net(2)
    optimizers = [wrapped(model, **options) for model in models]
    for epoch in range(2):
        for step in range(hvd.rank() * (epoch + 1) + 3 * epoch):
            for model, optimizer in zip(models, optimizers):
                take_step(model, optimizer, 10 * epoch + step)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() >= 1
        assert hvd.join() == hvd.size() - 1
        for model in models:
            hvd.broadcast_parameters(model.state_dict(), hvd.size() - 1)  # that took all steps
    for step in range(3):
        take_step(models[0], optimizers[0], 50 + step)
    return torch.cat([weights(model) for model in models])


def workers_that_have_joined_take_part_with_zeros() -> None:
    for options in ({}, {"op": hvd.Sum}, {"compression": Exact()}):
        torch.testing.assert_close(trained_unevenly(**options), trained_unevenly(**options, **NEGOTIATED))


def after_a_join_the_exchange_goes_on() -> None:
    model = net()
    optimizer = until_fixed(model)
    for _ in range(2):  # also without a step between them
        hvd.join()
    with submissions() as found:
        take_step(model, optimizer, 2)
    assert found == []


def gradients_in_flight_are_joined_with() -> None:
    """A worker may join between backward and the step."""
    model = net()
    optimizer = until_fixed(model)
    loss_of(model, *samples(hvd.rank(), 1)).backward()
    if hvd.rank() == 0:
        optimizer.step()
        for step in range(3):
            take_step(model, optimizer, step)
    hvd.join()
    optimizer.load_state_dict(optimizer.state_dict())  # what is in flight does not count for a step to come
    take_step(model, optimizer)
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert torch.equal(hvd.broadcast(gradient, 0), gradient)


def parameters_are_frozen_and_unfrozen() -> None:
    def trained(**options: Any) -> Tensor:
        model = net()
        model[0].requires_grad_(False)
        optimizer = until_fixed(model, **options)
        for part, trains in ((model[0], True), (model[2], False), (model[2], True)):
            part.requires_grad_(trains)
            for step in range(3):
                take_step(model, optimizer, step)
        return weights(model)

    with submissions() as found:
        result = trained()
    assert found.count(FIX_ORDER) == 2
    torch.testing.assert_close(result, trained(**NEGOTIATED))


def parts_of_a_model_may_be_unused() -> None:
    """A parameter that some workers use has the mean, and one that no worker uses has a gradient of zeros."""
    model = nn.ModuleList([nn.Linear(2, 1) for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(model[i](torch.ones(1, 2)).sum() for i in (2, hvd.rank() % 2)).backward()
        held = model[2].weight.grad
        optimizer.synchronize()
        assert model[2].weight.grad is held  # written in place
        users = [sum(1 for rank in range(hvd.size()) if rank % 2 == i) / hvd.size() for i in range(2)]
        for each, part in zip(model, [*users, 1.0, 0.0]):
            assert each.weight.grad is not None
            torch.testing.assert_close(each.weight.grad, torch.full((1, 2), part))
        with optimizer.skip_synchronize():
            optimizer.step()


def sparse_gradients_beside_dense_ones() -> None:
    def trained(**options: Any) -> Tensor:
        torch.manual_seed(0)
        table, layer = nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([*table.parameters(), *layer.parameters()], 0.1), **options
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            layer(table(torch.tensor([1, 1, 2 + (hvd.rank() + step) % 8]))).sum().backward()
            optimizer.step()
        return torch.cat([weights(table), weights(layer)])

    with submissions() as found:
        result = trained()
    assert found.count(ALLREDUCE) == 4  # of two steps, weight and bias
    torch.testing.assert_close(result, trained(**NEGOTIATED))
    torch.testing.assert_close(result, trained(sparse_as_dense=True))


def dtypes_and_memory_formats_may_be_mixed() -> None:
    def trained(**options: Any) -> Tensor:
        torch.manual_seed(0)
        image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1)).to(memory_format=torch.channels_last)
        model[2].double()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            model[2](model[:2](image * (step + hvd.rank())).double()).sum().backward()
            optimizer.step()
        return torch.cat([weights(model[0]).double(), weights(model[2])])

    torch.testing.assert_close(trained(), trained(**NEGOTIATED))


def orders_and_formats_that_differ_are_negotiated() -> None:
    """Names belong together, and not places."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
    named = list(model.named_parameters())
    parameters = [p for _, p in named][:: 1 if hvd.rank() else -1]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model[0](torch.ones(1, 2)) + 2 * model[1](torch.ones(1, 2))).sum().backward()
        with submissions() as found:
            optimizer.step()
        for i, each in enumerate(model):
            torch.testing.assert_close(each.weight.grad, torch.full((2, 2), 1.0 + i))
    assert FIX_ORDER not in found  # it was submitted before the first gradient


def optimizers_with_the_same_names_take_turns() -> None:
    models = net(1), net(2)
    optimizers = [until_fixed(model) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            take_step(model, optimizer, step)
    assert len(exchanges()) == 1
    for model in models[:1]:
        loss_of(model, *samples(hvd.rank(), 1)).backward()
    with pytest.raises(ValueError, match="an optimizer with the same names has gradients in flight"):
        loss_of(models[1], *samples(hvd.rank(), 1)).backward()
    optimizers[0].step()
    del optimizer, optimizers, model, models


def exchanges() -> list[Any]:
    assert current().fixed is not None
    return list(current().fixed._exchanges)


def optimizers_that_have_ended_free_their_exchange() -> None:
    gc.collect()  # of the laws before
    kept, other = net(), nn.Linear(5, 1)
    optimizer = until_fixed(kept)
    until_fixed(other)
    first = exchanges()
    gc.collect()
    third = nn.Linear(5, 1, bias=False)
    last = until_fixed(third)
    assert len(exchanges()) == 2
    assert exchanges()[0] in first
    take_step(kept, optimizer)
    take_step(third, last)


def a_step_that_is_not_taken_does_not_count() -> None:
    model = net()
    optimizer = until_fixed(model)
    state = optimizer.state_dict()
    loss_of(model, *samples(7, 1)).backward()
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    (sum(p.sum() for p in model.parameters()) * float(hvd.rank())).backward()
    optimizer.synchronize()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, (hvd.size() - 1) / 2))
    with optimizer.skip_synchronize():
        optimizer.step()


def a_gradient_is_in_flight_once() -> None:
    model = net()
    optimizer = until_fixed(model)
    loss_of(model, *samples(0, 1)).backward()
    with pytest.raises(AssertionError, match="while gradients are in flight"):
        optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    with pytest.raises(ValueError, match="its gradient is in flight"):
        loss_of(model, *samples(0, 1)).backward()
    optimizer.step()


def gradients_of_the_second_order_are_exchanged() -> None:
    model = net()
    optimizer = until_fixed(model)
    optimizer.zero_grad()
    loss_of(model, *samples(hvd.rank(), 1)).backward(create_graph=True)
    optimizer.step()
    assert torch.equal(hvd.broadcast(weights(model), 0), weights(model))


def refused_gradients_are_errors() -> None:
    model = net()
    optimizer = until_fixed(model, compression=Exact())
    optimizer.zero_grad()
    (loss_of(model, *samples(0, 1)) * torch.nan).backward()
    for _ in range(2):
        with pytest.raises(
            hvd.HorovodInternalError, match=r"ValueError: 4\.bias: a gradient of weighted magnitude nan"
        ):
            optimizer.synchronize()


LAWS: list[Callable[[], None]] = [
    usual_options_need_no_negotiation,
    workers_that_have_joined_take_part_with_zeros,
    after_a_join_the_exchange_goes_on,
    gradients_in_flight_are_joined_with,
    parameters_are_frozen_and_unfrozen,
    parts_of_a_model_may_be_unused,
    sparse_gradients_beside_dense_ones,
    dtypes_and_memory_formats_may_be_mixed,
    orders_and_formats_that_differ_are_negotiated,
    optimizers_with_the_same_names_take_turns,
    optimizers_that_have_ended_free_their_exchange,
    a_step_that_is_not_taken_does_not_count,
    a_gradient_is_in_flight_once,
    gradients_of_the_second_order_are_exchanged,
]


def all_laws() -> None:
    for law in LAWS:
        law()
    if hvd.size() > 2:
        a_pair_negotiates()
    refused_gradients_are_errors()


@pytest.mark.parametrize(("size", "communicator"), [(2, "shared_memory"), (3, "shared_memory"), (2, "gloo")])
def test_laws(size: int, communicator: str, tmp_path: Path) -> None:
    over(size, tmp_path, all_laws, communicator=communicator)


def record(path: str) -> None:
    model = net()
    optimizer = until_fixed(model)
    hvd.start_timeline(path)
    take_step(model, optimizer, 2)
    hvd.stop_timeline()


def test_it_is_in_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    over(2, tmp_path, record, str(path))
    events = json.loads(path.read_text())
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["batches", "gradients.0.weight"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["ALLREDUCE"]


def step_without_a_worker() -> str:
    model = net()
    optimizer = until_fixed(model)
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss_of(model, *samples(0, 1)).backward()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        optimizer.step()
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.synchronize()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.join()
    return str(caught.value)


def join_without_a_worker() -> str:
    until_fixed(net())
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.join()
    return str(caught.value)


@pytest.mark.parametrize("law", [step_without_a_worker, join_without_a_worker])
@pytest.mark.parametrize("communicator", ["shared_memory", "gloo"])
def test_the_loss_of_a_worker_is_an_error(law: Callable[[], str], communicator: str, tmp_path: Path) -> None:
    with start(3, initialized, f"file://{tmp_path}", communicator, law) as workers:
        first, _, third = workers.results(lost={1})
    if communicator == "shared_memory":
        assert "worker 1" in first + third


def a_long_wait_is_reported() -> list[str]:
    negotiation._CHECK_SECONDS, negotiation._CHECKS_BEFORE_WARNING = 0.01, 1
    warnings = Warnings()
    model = net()
    optimizer = until_fixed(model)
    if hvd.rank() == 0:
        logging.getLogger("unisono").addHandler(warnings)
        take_step(model, optimizer)
    else:
        hvd.allreduce(torch.ones(1), name="warned")
        take_step(model, optimizer)
    return warnings.texts


def test_a_worker_that_others_wait_for_is_named(tmp_path: Path) -> None:
    first, _ = over(2, tmp_path, a_long_wait_is_reported)
    assert first[0].startswith("sum (gradients 1, message ")
    assert first[0].endswith("waits for worker 1 to start it")
