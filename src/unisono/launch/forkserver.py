"""A process that imports the heavy modules once, early, and forks a worker whenever the launcher asks.

Its two ends talk over one socket of whole messages (JSON). The server's end of file is the launcher's death,
however that came: the server then kills the workers with all that they started, removes the directory in
which they met, and ends. Should the server itself be killed, the kernel kills the workers
(`process.die_with`).

Why not multiprocessing's: there a start blocks until the imports are done, so that Ctrl-C must wait; its
workers hold the pipe by which its server would notice the launcher's death; and each worker runs the user's
script again.

    launcher ── Order, 2 descriptors ──► server ── fork ──► worker
             ◄── {"ready"} {"rank", "pid"} {"rank", "status"} ──
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from setproctitle import setproctitle

from unisono.launch import process, worker
from unisono.launch.worker import Order

_LARGEST_MESSAGE = 1 << 20  # bytes
_START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path');"
    "from unisono.launch.forkserver import serve; serve(**given)"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Forkserver:
    """The launcher's handle of a server process. A context: leaving it ends the server and every worker."""

    def __init__(self, preload: Sequence[str], name: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A name that both know before the directory is made: whoever of them outlives the other removes it.
        self._meeting = os.path.join(tempfile.gettempdir(), f"unisono-{secrets.token_hex(8)}")
        given = {"path": sys.path, "preload": list(preload), "name": name, "launcher": os.getpid()}
        given["meeting"] = self._meeting
        self.ready = False
        self._errors = os.memfd_create("forkserver-errors")
        self._control = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(given | {"descriptor": theirs.fileno()})],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=os.environ | _ONE_THREAD,
            )

    @property
    def meeting(self) -> str:
        """A private directory, there as long as workers are."""
        return self._meeting

    def fileno(self) -> int:
        """Readable when `receive` has something."""
        return self._control.fileno()

    def fork(self, order: Order, descriptors: Sequence[int]) -> None:
        """Ask for a worker that gets copies of `descriptors`."""
        socket.send_fds(self._control, [json.dumps(asdict(order)).encode()], descriptors)

    def receive(self) -> Mapping[str, Any] | None:
        """The server's next message; None when it has ended."""
        try:
            message = self._control.recv(_LARGEST_MESSAGE)
        except ConnectionResetError:
            return None
        news: Mapping[str, Any] | None = json.loads(message) if message else None
        if news is not None and "ready" in news:
            self.ready = True
        return news

    def autopsy(self) -> tuple[int, str]:
        """After its end: the server's exit status and what it said."""
        status = self._process.wait()
        return status, os.pread(self._errors, _LARGEST_MESSAGE, 0).decode(errors="replace")

    def close(self) -> None:
        """End the server and all workers; returns when they are gone. May be called twice."""
        if self._control.fileno() < 0:
            return
        self._control.close()
        if not self.ready:  # it is importing, has no worker yet, and would not look up for seconds
            self._process.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._errors)
        shutil.rmtree(self._meeting, ignore_errors=True)  # the server has removed it, unless it was killed

    def __enter__(self) -> Forkserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(preload: Sequence[str], name: str, launcher: int, descriptor: int, meeting: str) -> None:
    """The life of the server process, until the launcher's end of the socket closes."""
    process.die_with(launcher)  # while imports run, nobody looks at the socket
    setproctitle(f"{name} forkserver")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides; its end is told by the socket
    _import(preload)
    process.outlive_parent()  # from now on the socket tells, and what was made is taken away again
    os.mkdir(meeting, mode=0o700)
    _Server(socket.socket(fileno=descriptor), meeting).run()
    os._exit(0)  # taking torch down in order would cost most of a second


def _import(modules: Sequence[str]) -> None:
    gc.disable()
    for module in modules:
        with contextlib.suppress(ImportError):  # only a head start: who needs it will meet the error again
            importlib.import_module(module)
    gc.enable()
    gc.freeze()  # the workers' collections then leave the shared pages alone


class _Server:
    def __init__(self, control: socket.socket, meeting: str) -> None:
        self._control, self._meeting = control, meeting
        self._workers: dict[int, int] = {}  # pid: rank
        self._children, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        try:
            self._send(ready=True)
            while self._serve_one():
                pass
        finally:
            for pid in self._workers:
                process.kill_group(pid)
                os.waitpid(pid, 0)
            shutil.rmtree(self._meeting, ignore_errors=True)

    def _serve_one(self) -> bool:
        readable, _, _ = select.select([self._control, self._children], [], [])
        if self._children in readable:
            self._children.recv(4096)
            self._reap()
        if self._control in readable:
            text, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_MESSAGE, 8)
            if not text:
                return False
            self._fork(Order(**json.loads(text)), descriptors)
        return True

    def _fork(self, order: Order, descriptors: Sequence[int]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._become_child(server)
                status = worker.main(order, f"file://{self._meeting}", *descriptors)
            finally:
                os._exit(status)
        process.lead_group(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._workers[pid] = order.rank
        self._send(rank=order.rank, pid=pid)

    def _become_child(self, server: int) -> None:
        process.die_with(server)
        process.lead_group(0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for channel in (self._control, self._children, self._wakeup):
            channel.close()

    def _reap(self) -> None:
        while self._workers:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return
            _, status = os.waitpid(dead.si_pid, 0)
            process.kill_group(dead.si_pid)  # no other process gets this number as long as the group has members
            if dead.si_pid in self._workers:
                self._send(rank=self._workers.pop(dead.si_pid), status=os.waitstatus_to_exitcode(status))

    def _send(self, **news: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # end of file tells us next
            self._control.send(json.dumps(news).encode())
