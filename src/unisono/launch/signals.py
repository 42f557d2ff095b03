"""Receives signals to the launcher through a descriptor that an event loop can wait for."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Receives SIGINT, SIGTERM and SIGHUP in place of their handlers; a context manager.

    A signal that is ignored stays ignored (``nohup``). Outside the main thread, to which Python delivers no signals,
    the inbox stays empty.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._previous: dict[int, Any] = {}
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Descriptor that is readable when `take` has signals."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Numbers of the signals since the last call, oldest first."""
        try:
            return [number for number in self._reader.recv(4096) if number in self._previous]
        except BlockingIOError:
            return []

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            for number in _STOP_SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        pending = [] if kind else self.take()  # the previous handlers receive them
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_wakeup)
        self._reader.close()
        self._writer.close()
        for number in pending:
            os.kill(os.getpid(), number)
