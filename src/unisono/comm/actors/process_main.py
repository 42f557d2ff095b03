"""An actor in a process of its own: what runs there. `unisono.comm.actors.process` starts it.

It ends with its standard input, and with the worker that started it, however that ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from typing import IO

import torch
from setproctitle import setproctitle

from unisono.comm.actors.client import ActorAddress, connect_actor
from unisono.comm.actors.listener import ActorListener
from unisono.comm.actors.process import load
from unisono.comm.actors.server import ActorServer
from unisono.system.process import exit_with_parent


def main(orders: IO[bytes]) -> None:
    """Build the actor, meet the others, and answer until `orders` end."""
    order = json.loads(orders.readline())
    if order["parent"]:
        exit_with_parent(order["parent"])
    setproctitle(order["title"])
    logging.basicConfig(format=f"server {order['number']}: %(message)s")
    sys.path[:] = order["path"]
    torch.set_num_threads(int(order["config"].get("compute_threads", 1)))
    number, token = order["number"], bytes.fromhex(order["token"])
    told = orders.readline().strip()
    if not told:  # the worker has given up
        return
    places = [ActorAddress(**place) for place in json.loads(told)]
    watch = threading.Thread(target=_end_with, args=(orders,), name="watches its worker", daemon=True)
    watch.start()
    desk = ActorServer(load(order["service"], number, order["config"]), number, _not_counted)
    doors = [socket.socket(fileno=fd) for fd in order["fds"]]
    ActorListener(doors, token, number, desk.largest_bytes, desk.welcome, order["encrypted"])
    patience = order["timeout_seconds"]
    desk.connected([connect_actor(place, token, -1 - number, patience, run=desk.call_back) for place in places])
    watch.join()


def _end_with(orders: IO[bytes]) -> None:
    os.read(orders.fileno(), 1)  # nothing comes but the end; the buffer's lock would outlive this thread
    os._exit(0)


def _not_counted(sender: int, nbytes: int) -> None:
    pass


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    main(sys.stdin.buffer)
