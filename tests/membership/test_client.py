"""Clients at a real coordinator server: views begin, end and are left, also when the server restarts."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.support.coordinator import POLICY, TOKEN, running_coordinator
from unisono.errors import InvalidInput
from unisono.membership import Agent, CoordinatorAddress, StateVersion
from unisono.membership import client as client_module
from unisono.membership.client import CoordinatorClient
from unisono.membership.server.http_server import CoordinatorServer, Endpoint


def attend(url: str, worker: str) -> tuple[CoordinatorClient, list[int]]:
    aborted: list[int] = []
    return CoordinatorClient(CoordinatorAddress(url, TOKEN), Agent(worker, StateVersion()), aborted.append), aborted


def end_step(worker: CoordinatorClient, number: int, digest: str) -> None:
    """Take one more step, and end the view."""
    worker.add_steps(number)
    worker.end_view(number, digest)


def test_two_workers_train_one_joins_at_a_boundary_and_one_leaves(tmp_path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        (a, _), (b, _) = attend(served.url, "a"), attend(served.url, "b")
        with a, b:
            first = a.next_view()
            assert first == b.next_view()
            assert first is not None
            assert set(first.members) == {"a", "b"}
            for each in (a, b):
                each.joined(1, 0, "")
            with attend(served.url, "c")[0] as c:
                while not (a.votes_to_end and b.votes_to_end):
                    for each in (a, b):
                        each.add_steps(1)
                    threading.Event().wait(0.01)
                step = max(a.version.step, b.version.step)
                while a.version.step < step:
                    a.add_steps(1)
                while b.version.step < step:
                    b.add_steps(1)
                for each in (a, b):
                    end_step(each, 1, "state")
                second = c.next_view()
                assert second is not None
                assert second.members == (*first.members, "c")
                assert second.start == StateVersion(1, step + 1, "state")
                assert set(second.sources) == {"a", "b"}
                assert a.next_view() == b.next_view() == second
                for each in (a, b, c):
                    each.joined(2, second.start.step, "state")
                c.request_leave()
                while not a.votes_to_end:
                    threading.Event().wait(0.01)
                for each in (a, b, c):
                    end_step(each, 2, "later")
                assert c.next_view() is None
                third = a.next_view()
                assert third is not None
                assert third.members == first.members


def test_a_worker_that_loses_the_others_ends_the_view_for_all(tmp_path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        (a, aborted), (b, _) = attend(served.url, "a"), attend(served.url, "b")
        with a, b:
            for each in (a, b):
                view = each.next_view()
                assert view is not None
                each.joined(1, 0, "")
            b.fail_view(1, "")
            while not aborted:
                threading.Event().wait(0.01)
            a.fail_view(1, "")
            view = a.next_view()
            assert view is not None
            assert view.number == 2


def test_a_restarted_coordinator_continues_with_the_same_view(tmp_path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        port = int(served.url.rsplit(":", 1)[1])
        (a, _), (b, _) = attend(served.url, "a"), attend(served.url, "b")
        for each in (a, b):
            assert each.next_view() is not None
            each.joined(1, 0, "")
    for each in (a, b):
        each.add_steps(1)
    with a, b, running_coordinator(tmp_path / "state", port), attend(f"http://127.0.0.1:{port}", "c")[0] as c:
        while not (a.votes_to_end and b.votes_to_end):
            threading.Event().wait(0.01)
        for each in (a, b):
            end_step(each, 1, "state")
        view = c.next_view()
        assert view is not None
        assert view.number == 2
        assert view.start.step == 2


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "http://127.0.0.1", "ftp://a:1", "http://:80"])
def test_an_invalid_address_is_refused(url) -> None:
    with pytest.raises(InvalidInput, match="write http://host:port"):
        attend(url, "a")


def test_a_port_in_use_is_refused(tmp_path) -> None:
    with running_coordinator(tmp_path / "state") as served, pytest.raises(InvalidInput, match="choose another"):
        CoordinatorServer(Endpoint(port=int(served.url.rsplit(":", 1)[1])), POLICY, tmp_path / "other", TOKEN)


def test_a_worker_of_an_ended_run_gives_up(monkeypatch) -> None:
    monkeypatch.setattr(client_module, "_REFUSED_SECONDS", 0.1)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # without listening
        contact = CoordinatorAddress(f"http://127.0.0.1:{unused.getsockname()[1]}", TOKEN)
        with (
            CoordinatorClient(contact, Agent("late", StateVersion()), lambda number: None) as late,
            pytest.raises(InvalidInput, match="it does not respond any more"),
        ):
            late.next_view()


def test_a_worker_gives_up_on_a_coordinator_that_is_gone(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(client_module, "_GONE_SECONDS", 0.1)
    with running_coordinator(tmp_path / "state") as served:
        late, _ = attend(served.url, "late")
        while late._known is None:
            threading.Event().wait(0.01)
    with late, pytest.raises(InvalidInput, match="it does not respond any more"):
        late.next_view()
