"""The verbs of the public interface, between processes."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import unisono.horovod as hvd
from tests.horovod.workers import Warnings, initialized, over
from tests.support.processes import start
from unisono import TopK
from unisono.errors import InvalidInput
from unisono.horovod import lifecycle, negotiation


def mine(shape: tuple[int, ...] = (3, 2), rank: int | None = None) -> torch.Tensor:
    rank = hvd.rank() if rank is None else rank
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 10 * rank


def everybody(shape: tuple[int, ...] = (3, 2)) -> list[torch.Tensor]:
    return [mine(shape, rank) for rank in range(hvd.size())]


def names_match_in_any_order() -> None:
    drawn, handles = random.Random(hvd.rank()), {}
    for number in drawn.sample(range(40), 40):
        match number % 4:
            case 0:
                handles[number] = hvd.allreduce_async(mine() + number, name=f"n{number}", op=hvd.Sum)
            case 1:
                handles[number] = hvd.allgather_async(mine() + number, name=f"n{number}")
            case 2:
                handles[number] = hvd.broadcast_async(mine() + number, 0, name=f"n{number}")
            case 3:
                handles[number] = hvd.grouped_allreduce_async([mine(), mine() + number], name=f"n{number}", op=hvd.Max)
    for number in drawn.sample(range(40), 40):
        result = hvd.synchronize(handles[number])
        assert hvd.poll(handles[number])
        match number % 4:
            case 0:
                assert torch.equal(result, sum(everybody()) + number * hvd.size())
            case 1:
                assert torch.equal(result, torch.cat(everybody()) + number)
            case 2:
                assert torch.equal(result, mine(rank=0) + number)
            case 3:
                assert torch.equal(result[0], everybody()[-1])
                assert torch.equal(result[1], everybody()[-1] + number)


def results_are_written_in_place() -> None:
    x, y = mine(), mine().t()  # the second is not contiguous
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    assert torch.equal(x, sum(everybody()))
    hvd.grouped_allreduce_([y, x], op=hvd.Min)
    assert torch.equal(y, everybody()[0].t())
    root = hvd.size() - 1
    z = mine()
    assert hvd.broadcast_(z, root) is z
    assert torch.equal(z, mine(rank=root))
    source = mine()
    assert torch.equal(hvd.broadcast(source, root), mine(rank=root))
    assert torch.equal(source, mine())


def gradients_are_those_of_the_mean_loss() -> None:
    n, rank = hvd.size(), hvd.rank()

    def gradient(call: Callable[[torch.Tensor], torch.Tensor], of_result: torch.Tensor) -> torch.Tensor:
        x = mine((2 * n, 2)).requires_grad_()
        call(x).backward(of_result)
        assert x.grad is not None
        return x.grad

    whole = mine((2 * n, 2))
    mean = sum(mine((2 * n, 2), r) for r in range(n)) / n
    assert torch.allclose(gradient(lambda x: hvd.allreduce(x), whole), mean)
    assert torch.allclose(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5), whole), mean * n / 2)
    many = torch.cat([mine((2 * n, 2), r) for r in range(n)])
    assert torch.allclose(gradient(hvd.allgather, many), mine((2 * n, 2)))
    at_root = gradient(lambda x: hvd.broadcast(x, 0), whole)
    assert torch.allclose(at_root, mean if rank == 0 else torch.zeros_like(mean))
    splits = [1] * n  # of 2 n rows, n are not sent
    sent = gradient(lambda x: hvd.alltoall(x, splits)[0], torch.ones(n, 2))
    assert sent.sum(1).tolist() == [2.0] * n + [0.0] * n
    rows = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), torch.full((2, 2), float(rank)))
    assert torch.equal(rows, n * torch.arange(float(n)).repeat_interleave(2).view(-1, 1).expand(-1, 2))
    with pytest.raises(ValueError, match="op = Max: has no gradient here"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max), whole)


def differences_are_errors_on_all_workers() -> None:
    last = hvd.rank() == hvd.size() - 1
    for call in (
        lambda: hvd.allreduce(mine((3,) if last else (4,))),
        lambda: hvd.allreduce(mine().int() if last else mine()),
        lambda: hvd.allgather(mine((3, 2) if last else (3, 3))),
        lambda: hvd.broadcast(mine(), int(last)),
        lambda: hvd.alltoall(mine((6, 2)).int() if last else mine((6, 2))),
        lambda: hvd.reducescatter(mine((6,) if last else (7,))),
        lambda: hvd.allreduce(mine(), name="same") if last else hvd.allreduce(mine(), name="same", op=hvd.Sum),
    ):
        with pytest.raises(hvd.HorovodInternalError, match="let all workers submit the same"):
            call()
    with pytest.raises(RuntimeError, match="root_rank 7 is not in the process set"):
        hvd.broadcast(mine(), 7)
    assert torch.equal(hvd.allreduce(mine(), op=hvd.Sum), sum(everybody()))


def a_name_is_used_once_at_a_time() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(mine(), name="twice")
        with pytest.raises(ValueError, match=r"name = allreduce.twice: an operation of this name is in flight"):
            hvd.allreduce_async(mine(), name="twice")
    hvd.barrier()
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(mine(), name="twice")
    hvd.synchronize(handle)
    hvd.synchronize(hvd.allreduce_async(mine(), name="twice"))


def workers_with_less_data_join() -> None:
    steps = 3 + 2 * hvd.rank()
    for step in range(steps):
        present = [rank for rank in range(hvd.size()) if step < 3 + 2 * rank]
        mean = hvd.allreduce(mine())
        assert torch.allclose(mean, sum(mine(rank=rank) for rank in present) / hvd.size())
    if hvd.rank() == hvd.size() - 1 and hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="allgather has no value of a worker that has joined"):
            hvd.allgather(mine())
    assert hvd.join() == hvd.size() - 1
    assert torch.equal(hvd.allgather(mine()), torch.cat(everybody()))  # numbered alike again


def process_sets_restrict_operations() -> None:
    n, rank = hvd.size(), hvd.rank()
    even, last = hvd.add_process_set(range(0, n, 2)), hvd.ProcessSet([n - 1])
    assert last.process_set_id is None
    assert last.size() is None
    with pytest.raises(ValueError, match="it was not added, or was removed"):
        hvd.allreduce(mine(), process_set=last)
    hvd.add_process_set(last)
    with pytest.raises(ValueError, match="there is such a set already"):
        hvd.add_process_set([n - 1])
    with pytest.raises(ValueError, match=f"ranks = {n}: there are {n} workers"):
        hvd.add_process_set([0, n])
    if even.included():
        members = list(range(0, n, 2))
        assert even.rank() == members.index(rank)
        total = hvd.allreduce(mine(), op=hvd.Sum, process_set=even)
        assert torch.equal(total, sum(mine(rank=member) for member in members))
        assert torch.equal(hvd.broadcast(mine(), members[-1], process_set=even), mine(rank=members[-1]))
        hvd.barrier(even)
    else:
        with pytest.raises(ValueError, match="worker 1 is not in it"):
            hvd.allreduce(mine(), process_set=even)
    if last.included():
        assert hvd.broadcast_object("here", n - 1, process_set=last) == "here"
    assert hvd.remove_process_set(even)
    assert not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)


def objects_are_sent_without_pickling() -> None:
    value = {"a": [1, 2.5, None, True], 0: (b"\x00\xff", {"x", "y"}), "t": torch.arange(3, dtype=torch.int16)}
    received = hvd.broadcast_object(value if hvd.rank() == 0 else None)
    assert torch.equal(received["t"], value["t"])
    assert {**received, "t": 0} == {**value, "t": 0}
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": rank} for rank in range(hvd.size())]
    last = hvd.rank() == hvd.size() - 1
    kind = InvalidInput if last else hvd.HorovodInternalError
    with pytest.raises(kind, match=r"object\['f'\] = function: it cannot be sent to another worker"):
        hvd.allgather_object({"f": mine if last else 3})


def weights_and_optimizer_state_become_equal() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1), betas=(0.5, 0.6))
    if hvd.rank() == 0:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object([model.state_dict(), optimizer.state_dict()])
    assert [str(each) for each in states] == [str(states[0])] * hvd.size()
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="params = b: int: is not a tensor"):
        hvd.broadcast_parameters({"a": mine(), "b": 3}, 0)


def batch_norm_is_over_all_workers() -> None:
    torch.manual_seed(0)
    x = torch.randn(4 * hvd.size(), 3, 2, dtype=torch.float64)
    own = x[4 * hvd.rank() : 4 * hvd.rank() + 4].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    synchronized, plain = hvd.SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    result, expected = synchronized(own), plain(whole)
    assert torch.allclose(result, expected[4 * hvd.rank() : 4 * hvd.rank() + 4])
    assert torch.allclose(synchronized.running_var, plain.running_var)
    (result**3).sum().backward()
    (expected**3).sum().backward()
    assert whole.grad is not None
    assert own.grad is not None
    assert torch.allclose(own.grad, whole.grad[4 * hvd.rank() : 4 * hvd.rank() + 4])


LAWS = [
    names_match_in_any_order,
    results_are_written_in_place,
    gradients_are_those_of_the_mean_loss,
    a_name_is_used_once_at_a_time,
    workers_with_less_data_join,
    process_sets_restrict_operations,
    objects_are_sent_without_pickling,
    weights_and_optimizer_state_become_equal,
    batch_norm_is_over_all_workers,
    differences_are_errors_on_all_workers,
]


def all_laws() -> None:
    for law in LAWS:
        law()


@pytest.mark.parametrize(
    ("size", "communicator"),
    [(2, "shared_memory"), (3, "shared_memory"), pytest.param(3, "gloo", marks=pytest.mark.long)],
)
def test_laws(size: int, communicator: str, tmp_path: Path) -> None:
    over(size, tmp_path, all_laws, communicator=communicator)


def test_laws_of_one_worker(tmp_path: Path) -> None:
    def alone() -> None:
        for law in LAWS:
            if law not in (differences_are_errors_on_all_workers, a_name_is_used_once_at_a_time,
                           process_sets_restrict_operations):  # fmt: skip
                law()

    hvd.init()
    try:
        alone()
    finally:
        hvd.shutdown()


def arguments_are_checked() -> None:
    for call, words in [
        (lambda: hvd.allreduce(mine(), average=True, op=hvd.Sum), "average = True: op is given too"),
        (lambda: hvd.allreduce(mine().bool()), "tensor = torch.bool: has no allreduce"),
        (lambda: hvd.allreduce(mine().to_sparse()), "is not dense; use hvd.sparse_allreduce_async"),
        (lambda: hvd.allreduce(mine().int(), op=hvd.Adasum), "op = Adasum: is not for tensors of torch.int32"),
        (lambda: hvd.allreduce(mine(), compression=TopK()), "keeps a residual for each parameter"),
        (lambda: hvd.allreduce(mine(), compression=3), r"has no compress\(tensor\)"),
        (lambda: hvd.grouped_allreduce([mine(), mine().int()]), "differ in one group"),
        (lambda: hvd.grouped_allreduce([]), "is empty"),
        (lambda: hvd.allgather(torch.tensor(1)), "has no rows to allgather"),
        (lambda: hvd.alltoall(mine((3, 2))), "3 rows: cannot be divided by 2 members"),
        (lambda: hvd.alltoall(mine(), torch.ones(2)), "is not a list of whole numbers"),
        (lambda: hvd.alltoall(mine(), [2, 2]), "does not fit 2 members and 3 rows"),
        (lambda: hvd.alltoall(mine(), [1]), "does not fit 2 members and 3 rows"),
        (lambda: hvd.sparse_allreduce_async(mine().to_sparse(), "s", hvd.Max), "is not for sparse tensors"),
        (lambda: hvd.allreduce(mine(), name="n" * 2000), "more than 1000 characters"),
        (lambda: hvd.ProcessSet([0, -1]), "ranks = -1: is not a rank"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(RuntimeError, match="op = Adasum: cannot be divided among workers"):
        hvd.reducescatter(mine(), op=hvd.Adasum)
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        assert torch.equal(hvd.allreduce(mine(), average=False), sum(everybody()))


def facts_are_told() -> None:
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert not any([hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.ddl_built(), hvd.ccl_built()])
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert isinstance(hvd.nccl_built(), int)


def it_can_begin_again() -> None:
    hvd.init()
    assert torch.equal(hvd.allreduce(mine(), op=hvd.Sum), sum(everybody()))
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="hvd = not initialized"):
        hvd.rank()
    hvd.init(process_sets=[one := hvd.ProcessSet([1])])
    assert one.process_set_id == 1
    assert torch.equal(hvd.allreduce(mine(), op=hvd.Sum), sum(everybody()))


def two_workers() -> None:
    arguments_are_checked()
    facts_are_told()
    it_can_begin_again()


def test_two_workers(tmp_path: Path) -> None:
    over(2, tmp_path, two_workers)


def record(path: str) -> None:
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(mine(), name="first")
    hvd.stop_timeline()
    hvd.allreduce(mine(), name="second")


def test_a_timeline_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    over(2, tmp_path, record, str(path))
    events = json.loads(path.read_text())
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= {event["name"] for event in events}
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["batches", "allreduce.first"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def wait_for_a_lost_worker() -> str:
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(mine())
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(mine())
    return str(caught.value)


@pytest.mark.parametrize("communicator", ["shared_memory", "gloo"])
def test_the_loss_of_a_worker_is_an_error(communicator: str, tmp_path: Path) -> None:
    with start(3, initialized, f"file://{tmp_path}", communicator, wait_for_a_lost_worker) as workers:
        first, _, third = workers.results(lost={1})
    assert "worker 1" in first + third


def test_hosts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven workers on three hosts, of which the last has one."""
    facts = []
    for rank, local_rank in enumerate([0, 1, 2, 0, 1, 2, 0]):
        identity = SimpleNamespace(local_rank=local_rank)
        worker = SimpleNamespace(rank=rank, size=7, identity=identity, hosts=[*"aaabbb", "c"])
        monkeypatch.setattr(lifecycle, "current", lambda worker=worker: worker)
        facts.append((hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()))
    assert facts == [
        *((local, 3, 0, 3 if local == 0 else 2, False) for local in range(3)),
        *((local, 3, 1, 3 if local == 0 else 2, False) for local in range(3)),
        (0, 1, 2, 3, False),
    ]


def a_long_wait_is_reported() -> list[str]:
    negotiation._CHECK_SECONDS, negotiation._CHECKS_BEFORE_WARNING = 0.01, 1
    warnings = Warnings()
    if hvd.rank() == 0:
        logging.getLogger("unisono").addHandler(warnings)
        hvd.synchronize(hvd.allreduce_async(mine(), name="late"))
    else:
        hvd.allreduce(torch.ones(1), name="warned")
        hvd.allreduce(mine(), name="late")
    return warnings.texts


def test_a_worker_that_others_wait_for_is_named(tmp_path: Path) -> None:
    first, _ = over(2, tmp_path, a_long_wait_is_reported)
    assert first[0] == "allreduce.late waits for worker 1 to submit it"
