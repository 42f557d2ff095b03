"""What a worker reports of a failed view: a peer that left regularly is not unreachable."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.coordinator import TOKEN, running_coordinator
from tests.support.leftovers import within
from tests.support.processes import run
from unisono.elastic.session import ElasticSession
from unisono.errors import PeerLost
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.membership import CoordinatorAddress, Policy
from unisono.observe import ThreadTracker

LONGEST_SECONDS = 30.0


def members_of_the_next(rank: int, size: int, contact: CoordinatorAddress, path: Path) -> set[str]:
    """After a view of two who have met, in which each then took the other for lost."""

    def wait_for_the_other(name: str) -> None:
        (path / f"{name}-{rank}").touch()
        assert within(LONGEST_SECONDS, lambda: len(list(path.glob(f"{name}-*"))) == size)

    worker = WorkerContext(
        WorkerIdentity(rank, size, rank, size, "", "x"), lambda message: None, StopRequest(), str(rank)
    )
    with ElasticSession(worker, "auto", 60.0, contact, ThreadTracker()) as views:
        assert views.next_view()
        views.rendezvous(torch.device("cpu")).connect([0, 1]).close()
        wait_for_the_other("met")
        views.end_view("", PeerLost([1 - views.rank], "sum", "it has closed its end"))
        assert views.next_view()
        wait_for_the_other("over")
        return set(views.view.members)


def test_who_has_closed_its_end_is_within_reach(tmp_path: Path) -> None:
    """Of several who are told that a view is over, one hears it first and leaves; the others may see that sooner."""
    policy = Policy(expected_workers=2, max_workers=2, quarantine_seconds=1e6, join_timeout_seconds=1e6)
    with running_coordinator(tmp_path / "state", policy=policy) as served:
        contact = CoordinatorAddress(served.url, TOKEN, f"file://{tmp_path}/meeting")
        assert run(2, members_of_the_next, contact, tmp_path) == [{"0", "1"}] * 2
