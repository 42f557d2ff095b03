"""The server alone: messages that no worker can have sent are refused, and change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from unisono.comm import ActorMessage
from unisono.kvstore.placement import LARGEST_PART_BYTES, Placement
from unisono.kvstore.server import ValueServer
from unisono.sync.server.slice_state import MessageRefused


def call(server: ValueServer, sender: int, kind: str, fields: Mapping[str, Any], *tensors: torch.Tensor) -> list:
    """The answers so far."""
    answers: list[ActorMessage] = []
    server.receive(sender, ActorMessage(kind, fields, tensors), answers.append)
    return answers


def server_with_a_value(synchronous: bool = True) -> ValueServer:
    server = ValueServer(2, synchronous)
    (answer,) = call(server, 0, "init", {"key": "w", "part": 0, "shape": [3, 2], "numpy": False}, torch.zeros(6))
    assert answer.kind == "done"
    return server


def value(server: ValueServer) -> list[float]:
    (answer,) = call(server, 0, "pull", {"key": "w", "part": 0})
    return answer.tensors[0].reshape(-1).tolist()


W = {"key": "w", "part": 0}


@pytest.mark.parametrize(
    ("sender", "kind", "fields", "tensors"),
    [
        (0, "eval", W, []),
        (2, "pull", W, []),
        (-1, "pull", W, []),
        (0, "pull", {}, []),
        (0, "pull", {"key": "w", "part": "0"}, []),
        (0, "pull", {"key": "w", "part": True}, []),
        (0, "pull", {"key": ["w"], "part": 0}, []),
        (0, "pull", {"key": "v", "part": 0}, []),
        (0, "pull", {"key": "w", "part": 1}, []),
        (0, "init", {**W, "shape": [6]}, [torch.zeros(6)]),
        (0, "init", {"key": "v", "part": 0, "shape": [7]}, [torch.zeros(6)]),
        (0, "init", {"key": "v", "part": 0, "shape": [-1, -6]}, [torch.zeros(6)]),
        (0, "init", {"key": "v", "part": 0, "shape": "6"}, [torch.zeros(6)]),
        (0, "init", {"key": "v", "part": 0}, [torch.zeros(6)]),
        (0, "init", {"key": "v", "part": 0, "shape": [6]}, []),
        (0, "push", W, [torch.ones(5)]),
        (0, "push", W, [torch.ones(6, dtype=torch.float64)]),
        (0, "push", W, []),
        (0, "push", W, [torch.ones(6)] * 2),
        (0, "push", {**W, "compress": {"type": "os.system"}}, [torch.ones(6)]),
        (0, "push", {**W, "compress": {"type": "2bit"}}, [torch.ones(6)]),
        (0, "push", {**W, "compress": {"type": "1bit"}}, [torch.ones(1000, dtype=torch.uint8)]),
        (0, "rows", W, [torch.tensor([3])]),
        (0, "rows", W, [torch.tensor([-1])]),
        (0, "rows", W, [torch.tensor([1.0])]),
        (0, "rows", W, []),
        (0, "state", W, []),
        (0, "load", {**W, "shapes": {}}, []),
    ],
)
def test_what_no_worker_can_have_sent_is_refused(sender, kind, fields, tensors) -> None:
    server = server_with_a_value()
    with pytest.raises(Exception) as caught:
        call(server, sender, kind, fields, *tensors)
    assert isinstance(caught.value, ValueError) or "compression_params" in str(caught.value)
    assert value(server) == [0] * 6
    call(server, 0, "push", W, torch.ones(6))
    call(server, 1, "push", W, torch.ones(6))
    assert value(server) == [2] * 6


def test_a_second_push_in_one_round_is_refused() -> None:
    server = server_with_a_value()
    assert call(server, 0, "push", W, torch.ones(6)) == []
    with pytest.raises(MessageRefused, match="a second push of worker 0"):
        call(server, 0, "push", W, torch.ones(6))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pushes_are_added_in_the_order_of_ranks(order) -> None:
    server = server_with_a_value()
    pushes = [torch.full((6,), 2.0**24), torch.ones(6)]
    answers = [call(server, worker, "push", W, pushes[worker].clone()) for worker in order]
    assert answers[0][0].kind == "done"
    assert value(server) == (pushes[0] + pushes[1]).tolist()


def test_requests_that_depend_on_a_lost_worker_are_answered() -> None:
    server = server_with_a_value()
    push = call(server, 0, "push", W, torch.ones(6))
    pull = call(server, 0, "pull", W)
    assert push == pull == []
    server.lost(1)
    server.lost(-1)
    after = call(server, 0, "push", W, torch.ones(6))
    assert [(each.kind, each.fields) for each in (*push, *pull, *after)] == [("lost", {"workers": [1]})] * 3
    assert value(server) == [0] * 6


def test_an_asynchronous_server_does_not_need_the_lost_worker() -> None:
    server = server_with_a_value(synchronous=False)
    server.lost(1)
    assert call(server, 0, "push", W, torch.ones(6))[0].kind == "done"
    assert value(server) == [1] * 6


# --- which worker stores what


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (4, 0), (2, 50), (7, 3), (100,), (1, 100)], ids=str)
def test_parts_are_the_rows_of_the_value(workers, shape) -> None:
    parts = Placement(workers, 20).place(shape, 4)
    numel = torch.empty(shape).numel()
    assert len(parts) == (min(workers, shape[0]) if numel >= 20 else 1)
    assert [part.number for part in parts] == list(range(len(parts)))
    assert [parts[0].start, *[part.stop for part in parts]] == [
        *[part.start for part in parts],
        shape[0] if shape else 1,
    ]
    for part in parts:
        assert part.whole == (len(parts) == 1)
        assert part.shape == (shape if part.whole else (part.stop - part.start, *shape[1:]))
        assert 0 <= part.worker < workers
    if len(parts) == workers:
        assert len({part.worker for part in parts}) == workers


def test_workers_store_about_the_same() -> None:
    placement, loads = Placement(3, 1000), [0, 0, 0]
    for rows in (500, 4000, 20, 999, 3, 2000, 700, 10, 10):
        for part in placement.place((rows, 1), 8):
            loads[part.worker] += part.stop - part.start
    assert max(loads) - min(loads) < 1000  # the largest value that is not divided


def test_a_part_fits_into_a_message() -> None:
    parts = Placement(2, 1000).place((1 << 30, 4), 4)
    assert len(parts) == 128
    assert all((part.stop - part.start) * 16 <= LARGEST_PART_BYTES for part in parts)
