"""A fork server: it imports the large modules once, early, and forks a worker whenever the launcher asks.

Launcher and server exchange messages (JSON) over one SOCK_SEQPACKET socket. The server forks twice, and the first child
exits at once, so that the launcher becomes the parent of the worker. The launcher therefore receives the exit status of
every worker, also if the server has been killed. The next worker that is needed then starts another server.

If the launcher is killed, the kernel kills the workers (`process.exit_with_parent`). The server reads end of file,
kills the processes that workers have started, removes the rendezvous directory, and exits.

multiprocessing's fork server does not fit. A start blocks until the imports are done, so Ctrl-C has to wait. Workers
hold the pipe by which its server would notice the launcher's exit. And each worker runs the user's script again.

    launcher ── WorkerSpec, descriptors ──► server ── fork, fork ──► worker
             ◄── {"ready"} ──
             ── {"exited"} ──►
             ◄── {"rank", "pid"} ──────────────────────────────────
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

from unisono.launch import worker_main
from unisono.launch.worker_main import WorkerSpec
from unisono.system import process
from unisono.system.exit_status import exit_clause

_MAX_MESSAGE_BYTES = 1 << 20
_START = (
    "import json, socket, sys; control = socket.socket(fileno=int(sys.argv[1]));"
    f"options = json.loads(control.recv({_MAX_MESSAGE_BYTES})); sys.path[:] = options.pop('path');"
    "from unisono.launch.forkserver import serve; serve(control, **options)"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class ForkServer:
    """The launcher's handle of the server process and of the workers; a context manager, which ends all of them.

    Attributes:
        ready: whether a server has imported its modules.
    """

    def __init__(self, preload: Sequence[str], name: str) -> None:
        # Both processes know the name before the directory is made, so that either can remove it. The name is random
        # and travels over the socket: arguments are public, and another user could create the directory first.
        self._rendezvous = os.path.join(_temporary_directory(), f"unisono-{secrets.token_hex(8)}")
        self._options = {
            "path": sys.path, "preload": list(preload), "name": name, "launcher": os.getpid(),
            "rendezvous": self._rendezvous,
        }  # fmt: skip
        self.ready = self._server_ready = False
        self._output = os.memfd_create("forkserver-errors")
        self._forking: list[int] = []  # ranks of workers that were asked for and whose pid is not known yet
        self._workers: dict[int, tuple[int, int]] = {}  # by pidfd: pid and rank
        self._was_subreaper = process.is_subreaper()
        self._epoll = select.epoll()
        self._start()

    @property
    def rendezvous_directory(self) -> str:
        """A private directory, which exists as long as workers do."""
        return self._rendezvous

    def fileno(self) -> int:
        """Descriptor that is readable when `receive` has events."""
        return self._epoll.fileno()

    def fork(self, spec: WorkerSpec, descriptors: Sequence[int]) -> None:
        """Ask the server for a worker with copies of `descriptors`; starts another server if the last has exited."""
        if self._control is None:
            self._start()
        assert self._control is not None
        self._forking.append(spec.rank)
        process.set_subreaper(True)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server has exited: see `receive`
            socket.send_fds(self._control, [json.dumps(asdict(spec)).encode()], descriptors)

    def receive(self) -> list[Mapping[str, Any]]:
        """Events since the last call.

        Each event has one of these: ``ready``; ``rank`` and ``pid`` of a worker that has started; ``rank`` and
        ``status`` of a worker that has exited; a ``notice`` about the server; ``server_status``, if the server exited
        before any server was ready.
        """
        events: list[Mapping[str, Any]] = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor in self._workers:
                events.append(self._reap(descriptor))
            else:
                events += self._receive_from_server()
        return events

    def exit_report(self) -> tuple[int, str]:
        """The server's exit status and output; waits for its exit."""
        status = self._process.wait()
        return status, os.pread(self._output, _MAX_MESSAGE_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        """End the server and all workers, and wait until they have exited; may be called twice."""
        if self._epoll.closed:
            return
        if self._control is not None:
            self._end_server(self._control)
        for descriptor in list(self._workers):
            self._reap(descriptor)
        self._epoll.close()
        os.close(self._output)
        shutil.rmtree(self._rendezvous, ignore_errors=True)  # the server has removed it, unless it was killed

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = self._options | {"workers": [pid for pid, _ in self._workers.values()]}
        ours.send(json.dumps(options).encode())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=os.environ | _ONE_THREAD,
            )
        self._control: socket.socket | None = ours
        self._server_ready = False
        self._epoll.register(ours, select.EPOLLIN)

    def _receive_from_server(self) -> list[Mapping[str, Any]]:
        assert self._control is not None
        try:
            message = self._control.recv(_MAX_MESSAGE_BYTES)
        except ConnectionResetError:  # the server has left requests unread; what it and its workers sent is read next
            return []
        if not message:
            return self._server_exited()
        event: Mapping[str, Any] = json.loads(message)
        if "ready" in event:
            self.ready = self._server_ready = True
        if "pid" in event:
            self._worker_started(**event)
        return [event]

    def _worker_started(self, rank: int, pid: int) -> None:
        self._forking.remove(rank)
        if not self._forking:
            process.set_subreaper(self._was_subreaper)  # adopt no orphans but workers
        descriptor = os.pidfd_open(pid)
        self._workers[descriptor] = pid, rank
        self._epoll.register(descriptor, select.EPOLLIN)

    def _server_exited(self) -> list[Mapping[str, Any]]:
        """The events that the server's exit causes: workers continue, but workers that had not started are lost."""
        assert self._control is not None
        status = self._process.wait()
        self._epoll.unregister(self._control)
        self._control.close()
        self._control = None
        process.set_subreaper(self._was_subreaper)
        missing, self._forking = self._forking, []
        if not self.ready:
            return [{"server_status": status}]
        notice = f"the fork server {exit_clause(status)}: workers continue, and another server is started when needed"
        return [{"notice": notice}, *({"rank": rank, "status": status} for rank in missing)]

    def _reap(self, descriptor: int) -> Mapping[str, Any]:
        """Kill what is left of a worker's process group, and return the event of its exit."""
        pid, rank = self._workers.pop(descriptor)
        self._epoll.unregister(descriptor)
        process.kill_group(pid)  # the pid is not reused before waitpid
        if self._control is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._control.send(json.dumps({"exited": pid}).encode())
        _, status = os.waitpid(pid, 0)
        os.close(descriptor)
        return {"rank": rank, "status": os.waitstatus_to_exitcode(status)}

    def _end_server(self, control: socket.socket) -> None:
        control.shutdown(socket.SHUT_WR)
        if not self._server_ready:  # the server is importing, reads nothing for seconds, and has forked no worker
            self._process.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._control is not None:  # the server's last messages may report workers that have just started
            self._receive_from_server()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _temporary_directory() -> str:
    """The directory that `tempfile` would choose.

    `tempfile` finds out by writing a file, which stays if the process is killed meanwhile.
    """
    names = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    candidates = [name for name in (*names, "/tmp", "/var/tmp", "/usr/tmp") if name]
    return next((os.path.abspath(name) for name in candidates if os.access(name, os.W_OK | os.X_OK)), os.getcwd())


def serve(
    control: socket.socket, preload: Sequence[str], name: str, launcher: int, rendezvous: str, workers: Sequence[int]
) -> None:
    """Run the server process until the launcher closes its end of the socket; does not return.

    Args:
        workers: pids of workers that an earlier server has forked.
    """
    process.exit_with_parent(launcher)  # the socket is not read during the imports
    setproctitle(f"{name} forkserver")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher handles signals, and ends the server over the socket
    _import(preload)
    process.clear_parent_death_signal()  # from now on, end of file ends the server after it has cleaned up
    try:
        os.mkdir(rendezvous, mode=0o700)
    except FileExistsError:
        if os.lstat(rendezvous).st_uid != os.getuid():  # otherwise an earlier server has made it
            raise
    _ServerProcess(control, rendezvous, launcher, workers).run()
    os._exit(0)  # regular exit with torch loaded takes most of a second


def _import(modules: Sequence[str]) -> None:
    gc.disable()
    for module in modules:
        with contextlib.suppress(ImportError):  # preloading only saves time: a worker raises the error if it matters
            importlib.import_module(module)
    gc.enable()
    gc.freeze()  # garbage collection in workers then leaves shared pages unchanged


class _ServerProcess:
    """The server in its own process: forks workers when the launcher asks for them, and cleans up at the end."""

    def __init__(self, control: socket.socket, rendezvous: str, launcher: int, workers: Iterable[int]) -> None:
        self._control, self._rendezvous, self._launcher = control, rendezvous, launcher
        self._workers = set(workers)
        self._forked_pid = mmap.mmap(-1, 8)  # written by a child

    def run(self) -> None:
        self._send(ready=True)
        while self._handle_message():
            pass
        for pid in self._workers:
            process.kill_group(pid)
        shutil.rmtree(self._rendezvous, ignore_errors=True)

    def _handle_message(self) -> bool:
        """Handle the next message; returns whether there was one."""
        try:
            text, descriptors, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE_BYTES, 8)
        except ConnectionResetError:  # the launcher exited before it had read all messages
            return False
        if not text:
            return False
        message = json.loads(text)
        if "exited" in message:
            self._workers.discard(message["exited"])
        else:
            self._fork(WorkerSpec(**message), descriptors)
        return True

    def _fork(self, spec: WorkerSpec, descriptors: Sequence[int]) -> None:
        child = os.fork()
        if child == 0:
            self._fork_again(spec, descriptors)
        _, status = os.waitpid(child, 0)
        if status:
            raise ChildProcessError(f"no worker could be forked: child exited with {os.waitstatus_to_exitcode(status)}")
        for descriptor in descriptors:
            os.close(descriptor)
        pid = int.from_bytes(self._forked_pid[:])
        self._workers.add(pid)

    def _fork_again(self, spec: WorkerSpec, descriptors: Sequence[int]) -> NoReturn:
        """Fork the worker in a child that exits at once, so that the launcher adopts the worker."""
        status, child = 1, os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(child, spec.rank)
                status = worker_main.main(spec, f"file://{self._rendezvous}", *descriptors)
            else:
                process.make_group_leader(pid)
                self._forked_pid[:] = pid.to_bytes(len(self._forked_pid))
                status = 0
        finally:
            os._exit(status)

    def _become_worker(self, parent: int, rank: int) -> None:
        """Leave the server. The worker itself reports its start, as the server may be killed before it can."""
        process.make_group_leader(0)
        while os.getppid() == parent:  # the parent is about to exit
            os.sched_yield()
        process.exit_with_parent(self._launcher)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self._send(rank=rank, pid=os.getpid())
        self._control.close()

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # end of file is read next
            self._control.send(json.dumps(message).encode())
