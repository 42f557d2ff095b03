"""Python imports this at its start where its directory is on the path: whatever it forks sends noise to its peers.

A worker under it is a member of a run like any other until then, with the run's token.
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
