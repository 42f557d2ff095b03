"""A store of every type does what MXNet's does; the reference is numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kvstore.reference import Reference, sgd
from tests.kvstore.stores import (
    CELLS,
    DISTRIBUTED,
    SHAPE,
    SYNCHRONOUS_CELLS,
    as_torch,
    gradients,
    normal,
    on_workers,
    pulled,
    with_store,
)
from unisono.comm import outcomes
from unisono.errors import InvalidInput, MessageMismatch, PeerLost, UnisonoError
from unisono.kvstore import KVStore, create

STEPS, DEVICES = 3, 2
KEYS = [3, "weight"]


def add(key: object, received, stored) -> None:
    stored += received


def expected(size: int, update=None, devices: int = DEVICES, steps: int = STEPS, shape=SHAPE) -> list[np.ndarray]:
    """The value after each round."""
    reference, found = Reference(normal(0, shape=shape), update), []
    for step in range(steps):
        reference.push([gradients(worker, step, devices, shape) for worker in range(size)])
        found.append(reference.value.copy())
    return found


# --- init, push and pull


@pytest.mark.parametrize(("name", "size"), CELLS)
@pytest.mark.parametrize("key", KEYS)
def test_every_worker_pulls_what_worker_0_initializes(name, size, key) -> None:
    def work(kv: KVStore) -> np.ndarray:
        kv.init(key, normal(5, kv.rank))
        return pulled(kv, key)

    for found in on_workers(name, size, work):
        assert np.array_equal(found, normal(5, 0))


@pytest.mark.parametrize(("name", "size"), SYNCHRONOUS_CELLS)
@pytest.mark.parametrize("bound", [1, 1000])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_push_replaces_the_value_by_the_sum_over_devices_and_workers(name, size, bound, kind) -> None:
    def work(kv: KVStore) -> list[np.ndarray]:
        make = as_torch if kind == "torch" else list
        kv.init("w", *make([normal(0)]))
        found = []
        for step in range(STEPS):
            kv.push("w", make(gradients(kv.rank, step, DEVICES)))
            outs = make([np.zeros(SHAPE, np.float32) for _ in range(DEVICES)])
            kv.pull("w", out=outs)
            assert np.array_equal(outs[0], outs[1])
            found.append(np.asarray(outs[0]))
        return found

    for found in on_workers(name, size, work, bigarray_bound=bound):
        np.testing.assert_array_equal(found, expected(size))


@pytest.mark.parametrize(("name", "size"), SYNCHRONOUS_CELLS)
def test_lists_of_keys_are_the_same_as_one_key_after_the_other(name, size) -> None:
    keys = [5, 7, 11]

    def work(kv: KVStore) -> list[np.ndarray]:
        kv.init(keys, [normal(0)] * 3)
        outs = [np.zeros(SHAPE, np.float32) for _ in keys]
        for step in range(STEPS):
            kv.push(keys, [gradients(kv.rank, step + i, DEVICES) for i in range(3)])
            kv.pull(keys, out=outs)
        return outs

    def alone(kv: KVStore) -> list[np.ndarray]:
        outs = []
        for i, key in enumerate(keys):
            kv.init(key, normal(0))
            for step in range(STEPS):
                kv.push(key, gradients(kv.rank, step + i, DEVICES))
            outs.append(pulled(kv, key))
        return outs

    found = on_workers(name, size, work)
    np.testing.assert_array_equal(found, on_workers(name, size, alone))
    np.testing.assert_array_equal(found, [found[0]] * size)


def test_a_key_that_is_named_twice_in_a_push_is_added() -> None:
    kv = create("local")
    kv.init(1, np.zeros(2))
    kv.push([1, 1], [np.ones(2), np.full(2, 3.0)])
    assert pulled(kv, 1, (2,)).tolist() == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 0), (2, 3, 4)], ids=str)
def test_values_of_any_dtype_and_shape(dtype, shape) -> None:
    start, change = torch.arange(24)[: int(np.prod(shape))].view(shape).to(dtype), torch.ones(shape, dtype=dtype)

    def work(kv: KVStore) -> torch.Tensor:
        kv.set_updater(add)
        kv.init("w", start)
        out = torch.empty(shape, dtype=dtype)
        kv.pushpull("w", change, out=out)
        return out

    for found in on_workers("dist_sync", 2, work, bigarray_bound=2):
        assert torch.equal(found, start + 2 * change)


def test_arrays_that_are_not_contiguous() -> None:
    kv, value = create("local"), np.arange(12.0).reshape(3, 4)
    kv.init("w", value.T)
    out = np.zeros((3, 8))[:, ::2].T
    kv.pull("w", out=out)
    assert np.array_equal(out, value.T)
    other = torch.zeros(3, 4, dtype=torch.float64).t()
    kv.push("w", torch.from_numpy(value).t().flip(0))
    kv.pull("w", out=other)
    assert np.array_equal(other, value.T[::-1])


def test_a_push_is_converted_to_the_stored_dtype_and_a_pull_to_that_of_the_array() -> None:
    kv = create("local")
    kv.set_updater(add)
    kv.init("w", torch.ones(3))
    kv.push("w", torch.full((3,), 2.0**-12, dtype=torch.float16))  # which 1 + x in fp16 would lose
    assert pulled(kv, "w", (3,), np.float64).tolist() == [1 + 2.0**-12] * 3
    half = torch.empty(3, dtype=torch.bfloat16)
    kv.pull("w", out=half)
    assert half.tolist() == [1.0] * 3


def test_the_caller_s_arrays_are_not_those_of_the_store() -> None:
    kv, value = create("local"), np.ones(2)
    kv.init(1, value)
    value[:] = 5
    assert pulled(kv, 1, (2,)).tolist() == [1, 1]
    kv.push(1, value)
    value[:] = 6
    out = pulled(kv, 1, (2,))
    out[:] = 7
    assert pulled(kv, 1, (2,)).tolist() == [5, 5]


def test_parameters_that_require_gradients_are_written() -> None:
    kv, weight = create("device"), torch.nn.Parameter(torch.ones(2))
    kv.init(1, weight)
    kv.pushpull(1, torch.tensor([3.0, 4.0]), out=weight)
    assert weight.tolist() == [3, 4]
    assert weight.requires_grad


def test_a_sparse_gradient_is_pushed() -> None:
    kv = create("local")
    kv.init("w", torch.ones(3, 2))
    kv.push("w", torch.sparse_coo_tensor([[2]], [[4.0, 5.0]], (3, 2), check_invariants=True))
    assert pulled(kv, "w", (3, 2)).tolist() == [[0, 0], [0, 0], [4, 5]]


# --- updates


@pytest.mark.parametrize(("name", "size"), SYNCHRONOUS_CELLS)
@pytest.mark.parametrize("bound", [1, 1000])
def test_an_updater_is_called_with_the_sum(name, size, bound) -> None:
    def work(kv: KVStore) -> list[np.ndarray]:
        kv.set_updater(add)
        kv.init("w", normal(0))
        found = []
        for step in range(STEPS):
            kv.push("w", gradients(kv.rank, step, DEVICES))
            found.append(pulled(kv, "w"))
        return found

    def update(received: np.ndarray, stored: np.ndarray) -> None:
        stored += received

    for found in on_workers(name, size, work, bigarray_bound=bound):
        np.testing.assert_array_equal(found, expected(size, update))


@pytest.mark.parametrize("kind", [np.ndarray, torch.Tensor])
def test_an_updater_gets_the_key_and_arrays_of_the_kind_that_was_initialized(kind) -> None:
    calls = []

    def updater(key: object, received, stored) -> None:
        calls.append((key, type(received), type(stored), received.shape))
        stored *= received

    kv = create("local")
    kv.set_updater(updater)
    kv.init("w", np.full(SHAPE, 2.0) if kind is np.ndarray else torch.full(SHAPE, 2.0))
    kv.push("w", np.full(SHAPE, 3.0))
    assert calls == [("w", kind, kind, SHAPE)]
    assert (pulled(kv, "w") == 6).all()


@pytest.mark.parametrize(("name", "size"), SYNCHRONOUS_CELLS)
@pytest.mark.parametrize("bound", [1, 1000])
def test_an_optimizer_takes_the_step_of_the_sum(name, size, bound) -> None:
    def work(kv: KVStore) -> list[np.ndarray]:
        kv.init("w", normal(0))
        kv.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        found = []
        for step in range(STEPS):
            kv.push("w", gradients(kv.rank, step, DEVICES))
            found.append(pulled(kv, "w"))
        return found

    for found in on_workers(name, size, work, bigarray_bound=bound):
        np.testing.assert_allclose(found, expected(size, sgd(0.1, 0.9)), rtol=1e-5, atol=1e-6)


def test_each_key_has_an_optimizer_state_of_its_own() -> None:
    kv = create("local")
    kv.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5))
    kv.init(["a", "b"], [np.zeros(1), np.zeros(1)])
    kv.push("a", np.ones(1))
    kv.push(["a", "b"], [np.ones(1), np.ones(1)])
    assert (pulled(kv, "a", (1,)).item(), pulled(kv, "b", (1,)).item()) == (-2.5, -1)


def test_a_second_optimizer_begins_with_an_empty_state() -> None:
    kv = create("local")
    kv.init("w", np.zeros(1))
    for _ in range(2):
        kv.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5))
        kv.push("w", np.ones(1))
    assert pulled(kv, "w", (1,)).item() == -2


def test_a_learning_rate_schedule_inside_the_function() -> None:
    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(made, step_size=2, gamma=0.1)
        made.register_step_post_hook(lambda *_: schedule.step())
        return made

    kv = create("local")
    kv.set_optimizer(optimizer)
    kv.init("w", np.zeros(1))
    for _ in range(4):
        kv.push("w", np.ones(1))
    assert pulled(kv, "w", (1,)).item() == pytest.approx(-2.2)


# --- dist_async


@pytest.mark.parametrize("name", ["dist_async", "dist_device_async", "dist_async_device"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bound", [1, 1000])
def test_asynchronous_pushes_are_applied_one_by_one(name, size, bound) -> None:
    """Each is an update of its own, and that of a worker is in what it pulls."""
    received = []

    def updater(key: object, x: np.ndarray, stored: np.ndarray) -> None:
        received.append(x.shape[0])
        stored += x

    def work(kv: KVStore) -> tuple[bool, np.ndarray]:
        kv.set_updater(updater)
        kv.init("w", np.zeros(SHAPE))
        ahead = True
        for step in range(STEPS):
            kv.push("w", np.full(SHAPE, 2.0 ** (10 * kv.rank)))
            mine = pulled(kv, "w", dtype=np.float64) // 2 ** (10 * kv.rank) % 2**10
            ahead &= bool((mine == step + 1).all())
        kv.barrier()
        return ahead, pulled(kv, "w", dtype=np.float64)

    for ahead, found in on_workers(name, size, work, bigarray_bound=bound):
        assert ahead
        assert (found == STEPS * sum(2.0 ** (10 * rank) for rank in range(size))).all()
    assert sum(received) == STEPS * size * SHAPE[0]


def test_an_asynchronous_store_does_not_wait_for_workers_that_push_nothing() -> None:
    def work(kv: KVStore) -> float:
        kv.set_updater(add)
        kv.init("w", np.zeros(1))
        for _ in range(3 * (kv.rank == 0)):
            kv.push("w", np.ones(1))
        return pulled(kv, "w", (1,)).item() if kv.rank == 0 else 3

    assert on_workers("dist_async", 3, work) == [3, 3, 3]


def test_an_asynchronous_push_without_an_update_is_refused() -> None:
    kv = create("dist_async")
    kv.init("w", np.zeros(1))
    with pytest.raises(InvalidInput, match=r"type = dist_async: .* call set_optimizer or set_updater"):
        kv.push("w", np.ones(1))
    kv.close()


# --- rounds of dist_sync


@pytest.mark.parametrize("size", [2, 3])
def test_a_pull_sees_the_round_of_the_last_push_whoever_is_ahead(size) -> None:
    def work(kv: KVStore) -> list[float]:
        kv.set_updater(add)
        kv.init("w", np.zeros(1))
        found = []
        for step in range(4):
            for _ in range(2):  # the second waits for the first
                kv.push("w", np.ones(1))
            if step % size != kv.rank:
                found.append(pulled(kv, "w", (1,)).item() / size)
        return found

    for rank, found in enumerate(on_workers("dist_sync", size, work)):
        assert found == [2.0 * (step + 1) for step in range(4) if step % size != rank]


def test_a_pull_without_a_push_is_answered_at_once() -> None:
    def work(kv: KVStore) -> float:
        kv.init("w", np.zeros(1))
        if kv.rank == 0:
            kv.push("w", np.ones(1))
            kv.barrier()
        else:
            before = pulled(kv, "w", (1,)).item()
            assert before == 0
            kv.barrier()
            kv.push("w", np.ones(1))
        return pulled(kv, "w", (1,)).item()

    assert on_workers("dist_sync", 2, work) == [2, 2]


# --- combinations


@pytest.mark.parametrize(("name", "size"), SYNCHRONOUS_CELLS)
def test_broadcast_and_pushpull(name, size) -> None:
    def work(kv: KVStore) -> list[np.ndarray]:
        out, both = np.zeros(SHAPE, np.float32), gradients(kv.rank, 0, DEVICES)
        kv.broadcast("w", normal(5, kv.rank), out=out)
        kv.pushpull("w", both)
        found = np.zeros(SHAPE, np.float32)
        kv.pushpull("w", gradients(kv.rank, 1, DEVICES), out=found)
        return [out, *both, found]

    first, second = expected(size, steps=2)
    for found in on_workers(name, size, work):
        np.testing.assert_array_equal(found, [normal(5, 0), first, first, second])


@pytest.mark.parametrize(("name", "size"), CELLS)
@pytest.mark.parametrize("bound", [1, 1000])
def test_rows_are_pulled_and_the_others_are_zero(name, size, bound) -> None:
    rows = [np.array([4, 0, 4]), torch.tensor([[1.0, 2.0]]), np.array([], np.int64)]

    def work(kv: KVStore) -> tuple[list[np.ndarray], np.ndarray]:
        kv.init("w", normal(0))
        outs = [np.full(SHAPE, 7, np.float32) for _ in rows]
        kv.row_sparse_pull("w", out=outs, row_ids=rows)
        one, same = np.full(SHAPE, 7, np.float32), torch.full(SHAPE, 7.0)
        kv.row_sparse_pull(["w"], out=[[one, same]], row_ids=np.array([3]))
        assert np.array_equal(one, same)
        return outs, one

    for outs, one in on_workers(name, size, work, bigarray_bound=bound):
        for out, wanted in zip([*outs, one], ([0, 4], [1, 2], [], [3])):
            expected = np.zeros(SHAPE, np.float32)
            expected[wanted] = normal(0)[wanted]
            assert np.array_equal(out, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pulled_rows_include_this_worker_s_push(size) -> None:
    def work(kv: KVStore) -> np.ndarray:
        kv.init("w", normal(0))
        kv.push("w", gradients(kv.rank, 0))
        out = np.zeros(SHAPE, np.float32)
        kv.row_sparse_pull("w", out=out, row_ids=np.arange(5))
        return out

    for found in on_workers("dist_sync", size, work, bigarray_bound=1):
        np.testing.assert_array_equal(found, expected(size, devices=1)[0])


# --- errors


def refused(what, match: str) -> None:
    kv = create("local")
    kv.init(["a", "b"], [np.zeros(2, np.float32), np.zeros((3, 2), np.float32)])
    with pytest.raises(InvalidInput, match=match):
        what(kv)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        (lambda kv: kv.init("a", np.zeros(2)), "key = a: it is initialized already"),
        (lambda kv: kv.init(3, np.zeros(2)), "key = 3: other keys are not of this type"),
        (lambda kv: kv.init(["c", 3], [np.zeros(2)] * 2), "it mixes integers and texts"),
        (lambda kv: kv.init("c", [np.zeros(2)] * 2), "key = c: it has 2 values"),
        (lambda kv: kv.init("c", []), "value of key 'c' = .*: it is empty"),
        (lambda kv: kv.init(True, np.zeros(2)), "key = True: it is of type bool"),
        (lambda kv: kv.init(2.0, np.zeros(2)), "key = 2.0: it is of type float"),
        (lambda kv: kv.init("c", 3.0), "value of key 'c' = float: it is neither a numpy array nor a torch tensor"),
        (lambda kv: kv.init("c", np.array(["x"])), "dtype = <U1: torch has no such dtype"),
        (lambda kv: kv.push("c", np.zeros(2)), "key = c: it is not initialized"),
        (lambda kv: kv.pull("c", out=np.zeros(2)), "key = c: it is not initialized"),
        (lambda kv: kv.push(["a", "b"], [np.zeros(2)]), "value = 1: there are 2 keys"),
        (lambda kv: kv.push(["a", "b"], np.zeros(2)), "value = ndarray: there are 2 keys"),
        (lambda kv: kv.push("a", np.zeros(3)), r"value of key 'a' = \[3\]: the value that is stored has shape \[2\]"),
        (lambda kv: kv.push("a", np.zeros(2, complex)), "value of key 'a' = complex128: it cannot be converted"),
        (lambda kv: kv.pull("a"), "out of key 'a' = NoneType: it is neither"),
        (lambda kv: kv.pull("a", out=np.zeros(3)), r"out of key 'a' = \[3\]: the value that is stored"),
        (lambda kv: kv.pull("a", out=np.zeros(2, int)), "out of key 'a' = float32: it cannot be converted to int64"),
        (lambda kv: kv.pull("a", out=np.broadcast_to(0.0, 2)), "it is sparse or read-only"),
        (lambda kv: kv.pull("b", out=torch.zeros(3, 2).to_sparse()), "it is sparse or read-only"),
        (lambda kv: kv.row_sparse_pull("b", out=np.zeros((3, 2)), row_ids=np.array([3])), "= 3: rows are 0 to 2"),
        (lambda kv: kv.row_sparse_pull("b", out=np.zeros((3, 2)), row_ids=np.array([0.5])), "= 0.5: rows are 0 to 2"),
        (lambda kv: kv.row_sparse_pull("b", out=[np.zeros((3, 2))] * 3, row_ids=[np.array([1])] * 2), "has 3 arrays"),
        (lambda kv: kv.row_sparse_pull("b", out=np.zeros((3, 2))), "row_ids of key 'b' = NoneType"),
        (lambda kv: kv.set_updater(3), "updater = int: it cannot be called"),
        (lambda kv: kv.set_optimizer("sgd"), "optimizer = str: it does not make a torch optimizer"),
        (lambda kv: kv.set_optimizer(torch.optim.SGD([torch.ones(1)])), "optimizer = SGD: it does not make"),
        (lambda kv: kv.set_optimizer(lambda parameters: 3), "optimizer = int: it does not make a torch optimizer"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(what, match) -> None:
    refused(what, match)


def test_a_value_without_dimensions_has_no_rows() -> None:
    kv = create("local")
    kv.init("c", np.zeros(()))
    with pytest.raises(InvalidInput, match="key = c: its value has no rows; call pull"):
        kv.row_sparse_pull("c", out=np.zeros(()), row_ids=np.array([0]))


def test_an_optimizer_that_is_not_elementwise_steps_whole_values_only() -> None:
    def muon(parameters):
        return torch.optim.Muon(parameters, lr=0.1)

    def own(parameters):
        return type("Own", (torch.optim.SGD,), {})(parameters, lr=0.5)

    def work(kv: KVStore, late: bool) -> np.ndarray:
        if late:
            kv.init("w", normal(0))
        kv.set_optimizer(own)
        if not late:
            kv.init("w", normal(0))
        kv.push("w", normal(1))
        return pulled(kv, "w")

    for late in (False, True):
        np.testing.assert_allclose(on_workers("dist_sync", 2, work, late), [normal(0) - normal(1)] * 2, rtol=1e-5)
        with pytest.raises(InvalidInput, match=r"optimizer = Own: .* larger bigarray_bound"):
            on_workers("dist_sync", 2, work, late, bigarray_bound=1)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nccl", "name = nccl: the stored values are in host memory; use 'device'"),
        ("Horovod", "name = Horovod: it has no store"),
        ("byteps", "it has no store"),
        ("p3", "priorities have no effect"),
        ("dist_sink", "there is no such type; use one of local, device, dist_sync, dist_async"),
        (3, "name = 3: there is no such type"),
    ],
)
def test_a_type_that_is_not_there_is_refused(name, match) -> None:
    with pytest.raises(InvalidInput, match=match):
        create(name)


def test_names_are_read_in_any_case() -> None:
    assert create("Local").type == "local"


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
@pytest.mark.parametrize(("size", "bound"), [(1, 9), (2, 9), (3, 1)])
def test_a_failure_of_an_update_is_raised_on_every_worker_that_needs_it(name, size, bound) -> None:
    def updater(key: object, received, stored) -> None:
        raise ValueError("spilled\nmilk")

    def push_and_pull(kv: KVStore) -> None:
        kv.push("w", normal(0))
        pulled(kv, "w")

    def work(kv: KVStore) -> str:
        kv.set_updater(updater)
        kv.init(["w", "v"], [np.zeros(SHAPE), np.zeros(SHAPE)])
        with pytest.raises(UnisonoError) as caught:
            push_and_pull(kv)
        pulled(kv, "v")  # which nothing has changed
        return str(caught.value)

    said = on_workers(name, size, work, bigarray_bound=bound)
    assert said == ["key = 'w': its update failed with ValueError: spilled"] * size


def test_workers_that_initialize_different_values_are_told_so() -> None:
    def work(kv: KVStore) -> None:
        kv.init(["a", "w"], [np.zeros(2), np.zeros(2 + kv.rank)])

    with pytest.raises(
        MessageMismatch, match=r"worker 0: init of key 'w', .* \[2\]; worker 1: init of key 'w', .* \[3\]"
    ):
        on_workers("dist_sync", 2, work)


def test_workers_that_call_different_methods_are_told_so() -> None:
    def work(kv: KVStore) -> None:
        if kv.rank == 0:
            kv.set_updater(add)
        kv.barrier()

    with pytest.raises(MessageMismatch, match="worker 0: set_updater; worker 1: barrier"):
        on_workers("dist_sync", 2, work)


@pytest.mark.parametrize("bound", [1, 1000])
def test_the_others_learn_that_a_worker_is_lost_whose_push_they_wait_for(bound) -> None:
    def work(kv: KVStore) -> None:
        kv.init(["v", "w"], [np.zeros(SHAPE)] * 2)
        if kv.rank == 2:
            raise KeyboardInterrupt
        kv.push("w", np.ones(SHAPE))
        pulled(kv, "w")

    options = {"bigarray_bound": bound}
    found = outcomes(3, with_store, "dist_sync", work, (), options)
    assert isinstance(found[2], KeyboardInterrupt)
    for each in found[:2]:
        assert isinstance(each, PeerLost)
        assert each.ranks == (2,)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_store_that_is_closed_after_an_error_does_not_wait_for_other_workers(name) -> None:
    def work(kv: KVStore) -> None:
        raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        on_workers(name, 2, work)


def test_a_store_waits_until_no_other_worker_needs_its_values() -> None:
    def work(kv: KVStore) -> float:
        kv.init(["a", "b", "c"], [np.full(3, 2.0)] * 3)
        if kv.rank < 2:
            return 6
        return sum(pulled(kv, key, (3,)).sum() for key in "abc") / 3

    assert on_workers("dist_sync", 3, work) == [6, 6, 6]


def test_closing_twice() -> None:
    kv = create("dist_sync")  # of a process that no launcher started
    assert (kv.rank, kv.num_workers) == (0, 1)
    kv.close()
    kv.close()
