"""Python imports this module at its start if its directory is on the path: forked processes then attack their peers.

Until it forks, such a worker is a regular member of a run, with the run's token.
"""

import contextlib
import os
import random
import socket
import threading
import time

_PAUSES = (4.0, 12.0)
_SIZES = (1, 8, 100, 1 << 16)


def _attack() -> None:
    choices = random.Random(os.getpid())
    while True:
        time.sleep(choices.uniform(*_PAUSES))
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as wire:
                there = wire.getpeername()
                if wire.family != socket.AF_INET or there[0] == wire.getsockname()[0]:
                    continue
                sent = wire.send(choices.randbytes(choices.choice(_SIZES)), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                with open(os.environ["HOSTILE_WORKER_LOG"], "a") as log:
                    log.write(f"{sent} bytes to {there[0]}:{there[1]}\n")


def _turn() -> None:
    threading.Thread(target=_attack, daemon=True).start()


os.register_at_fork(after_in_child=_turn)
