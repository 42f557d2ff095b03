"""Runs of real processes at a real coordinator, in which one worker gets stuck, and what is reported of it."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.netlab import Host

from tests.end_to_end.faults.runs import PLANTED
from tests.support import processes
from tests.support.coordinator import TOKEN, running_coordinator
from tests.support.namespace_sockets import socket_of
from tests.support.training_runs import HERE
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership.endpoint import Endpoint
from unisono.membership.http_client import EmptyBody, HttpConnection
from unisono.membership.messages import StatusMessage
from unisono.membership.server.http_server import CoordinatorServer
from unisono.run.spec import RunSpec
from unisono.run.worker import run_worker
from unisono.tasks.source import NamedTask

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
LONGEST_SECONDS = 60.0  # that anything is waited for
_FAILED_SECONDS = 1.0  # in which a failure is told


@dataclass
class UnderWay:
    """A run, while it is.

    Args:
        ear: hears what workers report to their launcher.
        path: holds their logs.
    """

    workers: processes.Workers
    ear: socket.socket
    path: Path
    line: HttpConnection

    def wait(self, kind: str) -> tuple[int, Mapping[str, Any]]:
        """The next message of that kind, and the rank of the worker that reported it. Where all workers have ended,
        their error is raised."""
        while True:
            try:
                rank, message = json.loads(self.ear.recv(1 << 16))
            except TimeoutError:
                self.workers.results()
                raise
            if message.get("kind") == kind:
                return rank, message

    def log(self, rank: int, words: str) -> str:
        """That worker's, once these words stand in it."""
        end = time.monotonic() + LONGEST_SECONDS
        while words not in (log := (self.path / f"worker-{rank}.log").read_text()):
            assert time.monotonic() < end, log
            time.sleep(0.02)
        return log

    def spent(self, rank: int) -> Mapping[str, float]:
        """Where that worker's time went, as the coordinator has it, once it has recovered."""
        end = time.monotonic() + LONGEST_SECONDS
        while True:
            spent = self.status().spent.get(str(rank), {})
            found = {phase.value: seconds for phase, seconds in spent.items()}
            if "recovery" in found:
                return found
            assert time.monotonic() < end, found
            time.sleep(0.05)

    def status(self) -> StatusMessage:
        """All that the coordinator knows."""
        answer = self.line.get("/v1/status", StatusMessage)
        assert answer is not None
        assert answer.body is not None
        return answer.body

    def until(self, *members: str) -> None:
        """Waits until the view has just these members, while steps are reported."""
        while set(self.status().view.members) != set(members):
            self.wait("progress")

    def gone(self, rank: int) -> None:
        """What a launcher says when it sees a process end."""
        self.line.request("POST", "/v1/gone", {"worker": str(rank)}, EmptyBody)


@contextmanager
def under_way(
    fault: str, path: Path, workers: int = 2, hosts: Sequence[Host] = (), **settings: Any
) -> Iterator[UnderWay]:
    """The task with that fault.

    Args:
        hosts: one for each worker; the coordinator is on the first. None: all are here.
    """
    # However long the others take to start: a view of one has nobody to lose.
    policy = Policy(min_workers=1, expected_workers=workers, max_workers=workers, join_timeout_seconds=LONGEST_SECONDS)
    with tempfile.TemporaryDirectory() as meeting, _coordinator(path / "state", policy, hosts) as url:
        contact = CoordinatorAddress(url, TOKEN, "" if hosts else f"file://{meeting}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
            ear.bind(f"{meeting}/ear")
            ear.settimeout(LONGEST_SECONDS)
            line = HttpConnection(contact)
            names = [host.name for host in hosts]
            settings = {"threads": 1, "workers": workers, **settings}
            told = (fault, settings, path, contact, f"{meeting}/ear", names)
            with processes.start(workers, _attend, *told, timeout_seconds=_FAILED_SECONDS) as started:
                yield UnderWay(started, ear, path, line)
            line.close()


@contextmanager
def _coordinator(state: Path, policy: Policy, hosts: Sequence[Host]) -> Iterator[str]:
    """Its URL."""
    if not hosts:
        with running_coordinator(state, policy=policy) as served:
            yield served.url
        return
    address = hosts[0].address
    with socket_of(hosts[0]) as door:
        door.bind((address, 0))
        door.listen()
        served = CoordinatorServer(Endpoint(address), policy, state, TOKEN, listener=door)
        thread = threading.Thread(target=served.run)
        thread.start()
        try:
            yield served.url
        finally:
            served.stop()
            thread.join()


def _attend(
    rank: int,
    size: int,
    fault: str,
    settings: dict[str, Any],
    path: Path,
    contact: CoordinatorAddress,
    ear: str,
    names: Sequence[str],
) -> dict[str, Any] | None:
    if names:
        with open(f"/run/netns/{names[rank]}") as namespace:
            assert not ctypes.CDLL(None).setns(namespace.fileno(), NEW_NETWORK)
    who = WorkerIdentity(rank, size, rank, size, f"file://{path}/unused", "unisono")  # views are met by the contact
    os.environ.update(who.environ())
    logging.getLogger("unisono").addHandler(logging.FileHandler(path / f"worker-{rank}.log"))
    mouth = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mouth.connect(ear)

    def report(message: Mapping[str, Any]) -> None:
        mouth.send(json.dumps([rank, message]).encode())

    order = RunSpec(NamedTask(f"{PLANTED}:task", {"fault": fault}, HERE), settings, path, time.time(), contact)
    return run_worker(WorkerContext(who, report, StopRequest(leaves=True), str(rank)), order)
