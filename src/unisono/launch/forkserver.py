"""A process that imports the heavy modules once, early, and forks a worker whenever the launcher asks.

Its two ends talk over one socket of whole messages (JSON). The server forks twice, and the first child ends at once,
so that the launcher becomes the parent of the worker: workers and their exit statuses are the launcher's, whatever
becomes of the server. If the server is killed, the next worker that is asked for starts another one.

If the launcher is killed, the kernel kills the workers (`process.die_with`). The server reads end of file, kills what
the workers started, removes the directory in which they met, and ends.

Why not multiprocessing's: there a start blocks until the imports are done, so that Ctrl-C must wait; its
workers hold the pipe by which its server would notice the launcher's death; and each worker runs the user's
script again.

    launcher ── Order, 2 descriptors ──► server ── fork, fork ──► worker
             ◄── {"ready"} {"rank", "pid"} ──
             ── {"gone"} ──►
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from setproctitle import setproctitle

from unisono.launch import process
from unisono.launch import worker_main as worker
from unisono.launch.worker_main import WorkerSpec
from unisono.system.exit_status import ended

_LARGEST_MESSAGE = 1 << 20  # bytes
_START = (
    "import json, socket, sys; control = socket.socket(fileno=int(sys.argv[1]));"
    f"given = json.loads(control.recv({_LARGEST_MESSAGE})); sys.path[:] = given.pop('path');"
    "from unisono.launch.forkserver import serve; serve(control, **given)"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Forkserver:
    """The launcher's handle of a server process and of the workers. A context: leaving it ends all of them.

    Attributes:
        ready: a server has imported its modules.
    """

    def __init__(self, preload: Sequence[str], name: str) -> None:
        # A name that both know before the directory is made: whoever of them outlives the other removes it. Nobody else
        # knows it before, and could make it first: it is told over the socket, not in arguments, which all can read.
        self._meeting = os.path.join(_temporary(), f"unisono-{secrets.token_hex(8)}")
        self._given = {
            "path": sys.path, "preload": list(preload), "name": name, "launcher": os.getpid(), "meeting": self._meeting,
        }  # fmt: skip
        self.ready = self._up = False
        self._errors = os.memfd_create("forkserver-errors")
        self._forking: list[int] = []  # ranks of workers that were asked for, and whose process is not known yet
        self._workers: dict[int, tuple[int, int]] = {}  # descriptor of the process: its number, and its rank
        self._adopted = process.adopts()
        self._watch = select.epoll()
        self._start()

    @property
    def meeting(self) -> str:
        """A private directory, there as long as workers are."""
        return self._meeting

    def fileno(self) -> int:
        """Readable when `receive` has something."""
        return self._watch.fileno()

    def fork(self, order: WorkerSpec, descriptors: Sequence[int]) -> None:
        """Ask for a worker that gets copies of `descriptors`, of a new server if there is none any more."""
        if self._control is None:
            self._start()
        assert self._control is not None
        self._forking.append(order.rank)
        process.adopt(True)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, as `receive` is about to say
            socket.send_fds(self._control, [json.dumps(asdict(order)).encode()], descriptors)

    def receive(self) -> list[Mapping[str, Any]]:
        """What has happened since: ``ready``; ``rank`` and ``pid`` of a worker that was started; ``rank`` and
        ``status`` of one that has ended; ``words`` about the server; ``ended``, its status, if it never was ready."""
        found: list[Mapping[str, Any]] = []
        for descriptor, _ in self._watch.poll(0):
            found += [self._reap(descriptor)] if descriptor in self._workers else self._hear()
        return found

    def autopsy(self) -> tuple[int, str]:
        """After its end: the server's exit status and what it said."""
        status = self._process.wait()
        return status, os.pread(self._errors, _LARGEST_MESSAGE, 0).decode(errors="replace")

    def close(self) -> None:
        """End the server and all workers; returns when they are gone. May be called twice."""
        if self._watch.closed:
            return
        if self._control is not None:
            self._end_server(self._control)
        for descriptor in list(self._workers):
            self._reap(descriptor)
        self._watch.close()
        os.close(self._errors)
        shutil.rmtree(self._meeting, ignore_errors=True)  # the server has removed it, unless it was killed

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = self._given | {"workers": [pid for pid, _ in self._workers.values()]}
        ours.send(json.dumps(given).encode())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=os.environ | _ONE_THREAD,
            )
        self._control: socket.socket | None = ours
        self._up = False
        self._watch.register(ours, select.EPOLLIN)

    def _hear(self) -> list[Mapping[str, Any]]:
        assert self._control is not None
        try:
            message = self._control.recv(_LARGEST_MESSAGE)
        except ConnectionResetError:
            message = b""
        if not message:
            return self._lose()
        news: Mapping[str, Any] = json.loads(message)
        if "ready" in news:
            self.ready = self._up = True
        if "pid" in news:
            self._take(**news)
        return [news]

    def _take(self, rank: int, pid: int) -> None:
        """A worker is there, and this process is its parent."""
        self._forking.remove(rank)
        if not self._forking:
            process.adopt(self._adopted)  # no orphan of anybody else
        descriptor = os.pidfd_open(pid)
        self._workers[descriptor] = pid, rank
        self._watch.register(descriptor, select.EPOLLIN)

    def _lose(self) -> list[Mapping[str, Any]]:
        """The server has ended, and workers go on; who was asked for meanwhile does not come."""
        assert self._control is not None
        status = self._process.wait()
        self._watch.unregister(self._control)
        self._control.close()
        self._control = None
        process.adopt(self._adopted)
        missing, self._forking = self._forking, []
        if not self.ready:
            return [{"ended": status}]
        words = f"the forkserver {ended(status)}: workers go on, and the next one that is needed starts another"
        return [{"words": words}, *({"rank": rank, "status": status} for rank in missing)]

    def _reap(self, descriptor: int) -> Mapping[str, Any]:
        """Kill the worker and what it started, as far as they have not ended, and take note of its end."""
        pid, rank = self._workers.pop(descriptor)
        self._watch.unregister(descriptor)
        process.kill_group(pid)  # no other process gets this number until we have waited for it
        if self._control is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._control.send(json.dumps({"gone": pid}).encode())
        _, status = os.waitpid(pid, 0)
        os.close(descriptor)
        return {"rank": rank, "status": os.waitstatus_to_exitcode(status)}

    def _end_server(self, control: socket.socket) -> None:
        control.shutdown(socket.SHUT_WR)
        if not self._up:  # it is importing, has no worker yet, and would not look up for seconds
            self._process.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._control is not None:  # what it said last: workers that nobody has heard of
            self._hear()

    def __enter__(self) -> Forkserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _temporary() -> str:
    """The directory that `tempfile` would choose; it finds out by writing a file, which stays where who writes it is
    killed meanwhile."""
    names = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    found = [name for name in (*names, "/tmp", "/var/tmp", "/usr/tmp") if name]
    return next((os.path.abspath(name) for name in found if os.access(name, os.W_OK | os.X_OK)), os.getcwd())


def serve(
    control: socket.socket, preload: Sequence[str], name: str, launcher: int, meeting: str, workers: Sequence[int]
) -> None:
    """The life of the server process, until the launcher's end of the socket closes.

    Args:
        workers: process numbers of those that an earlier server has forked.
    """
    process.die_with(launcher)  # while imports run, nobody looks at the socket
    setproctitle(f"{name} forkserver")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides; its end is told by the socket
    _import(preload)
    process.outlive_parent()  # from now on the socket tells, and what was made is taken away again
    try:
        os.mkdir(meeting, mode=0o700)
    except FileExistsError:
        if os.lstat(meeting).st_uid != os.getuid():  # else it is an earlier server's
            raise
    _Server(control, meeting, launcher, workers).run()
    os._exit(0)  # taking torch down in order would cost most of a second


def _import(modules: Sequence[str]) -> None:
    gc.disable()
    for module in modules:
        with contextlib.suppress(ImportError):  # only a head start: who needs it will meet the error again
            importlib.import_module(module)
    gc.enable()
    gc.freeze()  # the workers' collections then leave the shared pages alone


class _Server:
    def __init__(self, control: socket.socket, meeting: str, launcher: int, workers: Iterable[int]) -> None:
        self._control, self._meeting, self._launcher = control, meeting, launcher
        self._workers = set(workers)
        self._forked = mmap.mmap(-1, 8)  # a process number, from a child

    def run(self) -> None:
        self._send(ready=True)
        while self._serve_one():
            pass
        for pid in self._workers:
            process.kill_group(pid)
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _serve_one(self) -> bool:
        try:
            text, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_MESSAGE, 8)
        except ConnectionResetError:  # the launcher ended before it read what was said to it
            return False
        if not text:
            return False
        asked = json.loads(text)
        if "gone" in asked:
            self._workers.discard(asked["gone"])
        else:
            self._fork(WorkerSpec(**asked), descriptors)
        return True

    def _fork(self, order: WorkerSpec, descriptors: Sequence[int]) -> None:
        child = os.fork()
        if child == 0:
            self._fork_again(order, descriptors)
        _, status = os.waitpid(child, 0)
        if status:
            raise ChildProcessError(f"no worker could be forked: {os.waitstatus_to_exitcode(status)}")
        for descriptor in descriptors:
            os.close(descriptor)
        pid = int.from_bytes(self._forked[:])
        self._workers.add(pid)
        self._send(rank=order.rank, pid=pid)

    def _fork_again(self, order: WorkerSpec, descriptors: Sequence[int]) -> NoReturn:
        """In a child that ends at once, whose own child the launcher then adopts."""
        status, child = 1, os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(child)
                status = worker.main(order, f"file://{self._meeting}", *descriptors)
            else:
                process.lead_group(pid)
                self._forked[:] = pid.to_bytes(len(self._forked))
                status = 0
        finally:
            os._exit(status)

    def _become_worker(self, parent: int) -> None:
        process.lead_group(0)
        while os.getppid() == parent:  # it is about to end
            os.sched_yield()
        process.die_with(self._launcher)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self._control.close()

    def _send(self, **news: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # end of file tells us next
            self._control.send(json.dumps(news).encode())
