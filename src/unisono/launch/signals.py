"""Signals to the launcher, as something that can be awaited beside pipes and sockets."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Takes SIGINT, SIGTERM and SIGHUP in place of their handlers, as long as it is entered.

    A signal that is ignored stays ignored (``nohup``). Outside the main thread, where Python hands no
    signals, the inbox stays empty.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._former: dict[int, Any] = {}
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """The numbers of the signals that came since the last call, oldest first."""
        try:
            return [number for number in self._reader.recv(4096) if number in self._former]
        except BlockingIOError:
            return []

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._former_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            for number in _ASKED_TO_END:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._former[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        unheard = [] if kind else self.take()  # too late for us, not for whoever comes next
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._former_wakeup)
        self._reader.close()
        self._writer.close()
        for number in unheard:
            os.kill(os.getpid(), number)
