"""Workers submit in any order, and agree on one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from unisono.horovod.agreement import Agreement
from unisono.horovod.requests import (
    ADD_SET,
    AGREEMENTS,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    FIX_ORDER,
    JOIN,
    REMOVE_SET,
    REQUESTS,
    Agreed,
    Request,
    from_bytes,
    to_bytes,
)

SUM = Request("a", ALLREDUCE, dtype="float32", shapes=((3,),), op="Sum")


def names(agreed: list[Agreed]) -> list[str]:
    return [each.request.name for each in agreed]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_each_request_is_agreed_on_once_whatever_the_orders(size: int, seed: int) -> None:
    drawn, agreement = random.Random(seed), Agreement(size)
    submitted = [replace(SUM, name=str(n)) for n in range(20)]
    orders = [drawn.sample(submitted, len(submitted)) for _ in range(size)]
    agreed, done = [], [0] * size
    while any(done[rank] < len(submitted) for rank in range(size)):
        rank = drawn.choice([r for r in range(size) if done[r] < len(submitted)])
        count = drawn.randint(1, 4)
        agreed += agreement.submit(rank, orders[rank][done[rank] : done[rank] + count])
        done[rank] = min(done[rank] + count, len(submitted))
    assert sorted(names(agreed), key=int) == [each.name for each in submitted]
    assert not any(each.error for each in agreed)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (SUM, replace(SUM, shapes=((4,),)), "a: worker 0 has shape [3], worker 1 [4]; let all workers submit the same"),
        (SUM, replace(SUM, dtype="int64"), "worker 0 has dtype float32, worker 1 int64"),
        (SUM, replace(SUM, op="Average"), "worker 0 has op Sum, worker 1 Average"),
        (SUM, replace(SUM, verb=BROADCAST, root=0), "worker 0 has verb allreduce, worker 1 broadcast"),
        (SUM, replace(SUM, device="cuda"), "worker 0 has device cpu, worker 1 cuda"),
        (SUM, replace(SUM, prescale=2.0), "worker 0 has prescale 1.0, worker 1 2.0"),
        (replace(SUM, verb=BROADCAST, root=2), None, "root_rank 2 is not in the process set"),
        (replace(SUM, verb=ALLGATHER), replace(SUM, verb=ALLGATHER, shapes=((3, 1),)), "shape [3], worker 1 [3, 1]"),
    ],
)
def test_requests_that_differ_fail_on_all_workers(one: Request, other: Request | None, words: str) -> None:
    agreement = Agreement(2)
    assert agreement.submit(1, [other or one]) == []
    (failed,) = agreement.submit(0, [one])
    assert words in failed.error
    assert not failed.lost
    (again,) = agreement.submit(0, [SUM]) + agreement.submit(1, [SUM])  # the name can be used again
    assert not again.error


def test_what_may_differ_between_members_is_handed_on() -> None:
    agreement = Agreement(2)
    gather = Request("g", ALLGATHER, dtype="int32", shapes=((3, 2), (1, 2)))
    exchange = Request("x", ALLTOALL, dtype="int32", shapes=((3, 2),), numbers=(1, 2))
    agreement.submit(1, [replace(gather, shapes=((0, 2), (5, 2))), replace(exchange, numbers=(0, 4), shapes=((4, 2),))])
    first, second = agreement.submit(0, [gather, exchange])
    assert first.parts == ((3, 1), (0, 5))
    assert second.parts == ((1, 2), (0, 4))


def test_a_worker_that_has_joined_is_not_waited_for() -> None:
    agreement, join = Agreement(3), Request("join", JOIN)
    agreement.submit(0, [SUM])
    assert agreement.submit(1, [join]) == []
    assert names(agreement.submit(2, [SUM])) == ["a"]
    (refused,) = agreement.submit(0, [replace(SUM, op="Max")]) + agreement.submit(2, [replace(SUM, op="Max")])
    assert "allreduce with op Max has no value of a worker that has joined" in refused.error
    agreement.submit(0, [Request("b", BARRIER)])
    assert names(agreement.submit(2, [join])) == ["b"]  # it has become complete
    (last,) = agreement.submit(0, [join])
    assert last.result == 0
    assert names(agreement.submit(0, [SUM])) == []  # from now on all are waited for again


def test_an_order_is_fixed_where_all_workers_want_the_same() -> None:
    agreement, wanted = Agreement(2), Request("a", FIX_ORDER, numbers=(7,))
    agreement.submit(1, [replace(wanted, numbers=(7, 1, 2))])
    (same,) = agreement.submit(0, [wanted])
    assert (same.result, same.parts, same.error) == (1, ((7,), (7, 1, 2)), "")
    agreement.submit(1, [replace(wanted, numbers=(8,))])
    (different,) = agreement.submit(0, [wanted])
    assert (different.result, different.error) == (0, "")
    agreement.submit(1, [Request("join", JOIN)])
    (without_one,) = agreement.submit(0, [wanted])
    assert (without_one.result, without_one.error) == (0, "")


def test_process_sets_have_names_and_members_of_their_own() -> None:
    agreement, add = Agreement(3), Request("add", ADD_SET, numbers=(0, 2))
    (added,) = [each for rank in range(3) for each in agreement.submit(rank, [add])]
    inside = replace(SUM, members=added.result)
    agreement.submit(1, [SUM])
    agreement.submit(0, [SUM, inside])
    assert agreement.missing(inside.key) == [2]
    assert agreement.missing(SUM.key) == [2]
    assert names(agreement.submit(2, [inside])) == ["a"]
    with pytest.raises(ValueError, match=r"worker 1 is not in process set 1"):
        agreement.submit(1, [inside])
    with pytest.raises(ValueError, match=r"worker 0 submits a twice"):
        agreement.submit(0, [SUM])
    remove = Request("remove", REMOVE_SET, numbers=(added.result,))
    for rank in range(3):
        agreement.submit(rank, [remove])
    with pytest.raises(ValueError, match=r"worker 0 is not in process set 1"):
        agreement.submit(0, [inside])


def test_nothing_waits_for_a_worker_that_has_left() -> None:
    agreement = Agreement(2)
    agreement.submit(0, [SUM])
    (failed,) = agreement.leave(1)
    assert failed.lost
    assert failed.error == "a: worker 1 has shut down or is lost"
    (later,) = agreement.submit(0, [SUM])
    assert later.lost


def test_messages_are_read_as_they_were_written() -> None:
    requests = [SUM, Request("x", ALLTOALL, 3, "int32", ((2, 0), ()), prescale=0.1, numbers=(1, 1))]
    assert from_bytes(REQUESTS, to_bytes(REQUESTS, requests)) == requests
    agreed = [Agreed(SUM, ((1, 2), (3,)), "no", True, 5)]
    assert from_bytes(AGREEMENTS, to_bytes(AGREEMENTS, agreed)) == agreed
    with pytest.raises(ValueError, match="dtype='mean' is none of torch"):
        replace(SUM, dtype="mean").zeros()
