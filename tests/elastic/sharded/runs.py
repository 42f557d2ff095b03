"""Runs of real processes at a real coordinator, with sharded replicas, of which workers are killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.coordinator import TOKEN, running_coordinator
from tests.support.layout_runs import ROOT
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.launch.process_monitor import ProcessMonitor
from unisono.membership import CoordinatorAddress
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import StatusMessage
from unisono.observe import progress_reporter as telling
from unisono.run.elastic_run import policy_of
from unisono.run.resolve import resolve_config
from unisono.run.spec import RunSpec
from unisono.run.worker import run_worker
from unisono.tasks.source import NamedTask

LONGEST_SECONDS = 120.0


@dataclass
class UnderWay:
    """A run, while it is."""

    task: NamedTask
    settings: Mapping[str, Any]
    path: Path
    contact: CoordinatorAddress
    ear: Ear
    stack: contextlib.ExitStack
    line: HttpConnection
    monitor: ProcessMonitor
    workers: dict[str, processes.Workers] = field(default_factory=dict)
    _returned: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    @property
    def losses(self) -> dict[int, float]:
        """Of the steps that were told, by step; of one that was taken again, the last."""
        return self.ear.losses

    def start(self, names: Sequence[str]) -> None:
        """Workers of these names come."""
        for name in names:
            given = (name, self.task, dict(self.settings), self.path, self.contact, self.ear.address)
            started = processes.start(1, _attend, *given, timeout_seconds=LONGEST_SECONDS)
            self.workers[name] = self.stack.enter_context(started)
            self.monitor.process_started(name, self.workers[name].processes[0].pid)

    def until(self, step: int) -> None:
        """Wait for somebody to say that it is done."""
        with self.ear.news:
            assert self.ear.news.wait_for(lambda: max(self.losses, default=0) >= step, LONGEST_SECONDS)

    @property
    def members(self) -> list[str]:
        """Of the latest view, in the order of their ranks."""
        answer = self.line.get("/v1/status", StatusMessage)
        assert answer is not None
        assert answer.body is not None
        return list(answer.body.view.members)

    def view(self, *first: str, of: int) -> int:
        """Wait for steps in a view of so many, with these at first; the steps that were in its state."""

        def found() -> list[int]:
            now = [event for event in self.events("view") if len(event["members"]) == of]
            last = [event for event in now if event["members"][: len(first)] == list(first)][-1:]
            return [each["step"] for each in last if max(self.losses, default=0) > each["step"]]

        with self.ear.news:
            assert self.ear.news.wait_for(found, LONGEST_SECONDS), self.events("view")
        return found()[0]

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """This one ends, as a launcher sees it, or gets another signal."""
        process = self.workers[name].processes[0]
        os.kill(process.pid, how)
        if how is signal.SIGKILL:
            process.join()
            self.monitor.process_exited(name)

    def result(self) -> dict[str, Any]:
        """What it came to."""
        found = [self.returned(name) for name in self.workers if self.workers[name].processes[0].exitcode != -9]
        results = [each for each in found if each is not None]
        assert len({each["weights_sha256"] for each in results}) <= 2  # of a pipeline, one alone knows them
        return max(results, key=lambda each: len(each["weights_sha256"]))

    def returned(self, name: str) -> dict[str, Any] | None:
        """What this worker came to; None where the others went on without it."""
        if name not in self._returned:
            self._returned[name] = self.workers[name].results()[0]
        return self._returned[name]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What was recorded so far."""
        lines = (self.path / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def log(self, name: str) -> str:
        """That worker's."""
        return (self.path / f"worker-{name}.log").read_text()


class Ear:
    """Hears what workers tell their launcher, in a thread of its own: who tells waits for nobody."""

    def __init__(self, path: str) -> None:
        self.address, self.news, self.losses = path, threading.Condition(), dict[int, float]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while message := json.loads(self._socket.recv(1 << 16)):
            if message.get("kind") == "progress":
                with self.news:
                    self.losses[message["step"]] = message["loss"]
                    self.news.notify_all()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            mouth.sendto(b"null", self.address)
        self._thread.join()
        self._socket.close()


@contextlib.contextmanager
def under_way(task: str, path: Path, workers: int, optimizer: str = "sgd", **settings: Any) -> Iterator[UnderWay]:
    """A task of `tests.support.layout_models`, by workers 0, 1, ..."""
    path.mkdir(parents=True, exist_ok=True)
    source = NamedTask(f"tests.support.layout_models:{task}", {"optimizer": optimizer}, ROOT)
    settings = {"threads": 1, "workers": workers, "timeout_seconds": 30.0, **settings}
    policy = policy_of(resolve_config(source.load(), settings))
    with contextlib.ExitStack() as stack:
        meeting = stack.enter_context(tempfile.TemporaryDirectory())
        served = stack.enter_context(running_coordinator(path / "state", policy=policy))
        contact = CoordinatorAddress(served.url, TOKEN, f"file://{meeting}")
        line = HttpConnection(contact)
        stack.callback(line.close)
        ear = Ear(f"{meeting}/ear")
        stack.callback(ear.close)
        monitor = stack.enter_context(ProcessMonitor(contact))  # or a busy host looks like a frozen worker
        run = UnderWay(source, settings, path, contact, ear, stack, line, monitor)
        run.start([str(i) for i in range(workers)])
        yield run


def _attend(
    rank: int,
    size: int,
    name: str,
    task: NamedTask,
    settings: dict[str, Any],
    path: Path,
    contact: CoordinatorAddress,
    ear: str,
) -> dict[str, Any] | None:
    telling.REPORT_SECONDS = 0.0  # every step is told
    logging.getLogger("unisono").addHandler(logging.FileHandler(path / f"worker-{name}.log"))
    logging.getLogger("unisono").setLevel(logging.DEBUG)
    mouth = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mouth.connect(ear)
    place = int(name.partition(".")[0])
    who = WorkerIdentity(place, settings["workers"], place, settings["workers"], "", "unisono")
    report = lambda message: mouth.send(json.dumps(message).encode())
    order = RunSpec(task, settings, path, time.time(), contact)
    return run_worker(WorkerContext(who, report, StopRequest(leaves=True), name), order)
