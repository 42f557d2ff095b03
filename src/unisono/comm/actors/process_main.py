"""An actor in a process of its own: the main function of that process. `unisono.comm.actors.process` starts it.

The process exits when its standard input ends, and when the worker that started it exits.
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


def main(control: IO[bytes]) -> None:
    """Build the actor, connect it with its peers, and answer messages until `control` ends."""
    start_message = json.loads(control.readline())
    if start_message["parent"]:
        exit_with_parent(start_message["parent"])
    setproctitle(start_message["title"])
    logging.basicConfig(format=f"server {start_message['number']}: %(message)s")
    sys.path[:] = start_message["path"]
    torch.set_num_threads(int(start_message["config"].get("compute_threads", 1)))
    number, token = start_message["number"], bytes.fromhex(start_message["token"])
    addresses_line = control.readline().strip()
    if not addresses_line:  # the worker has closed the service before all its actors were started
        return
    addresses = [ActorAddress(**address) for address in json.loads(addresses_line)]
    watcher = threading.Thread(target=_exit_at_eof, args=(control,), name="watches its worker", daemon=True)
    watcher.start()
    server = ActorServer(load(start_message["service"], number, start_message["config"]), number, _not_counted)
    sockets = [socket.socket(fileno=fd) for fd in start_message["fds"]]
    ActorListener(sockets, token, number, server.largest_bytes, server.accept, start_message["encrypted"])
    timeout_seconds = start_message["timeout_seconds"]
    server.connected(
        [connect_actor(address, token, -1 - number, timeout_seconds, run=server.call_back) for address in addresses]
    )
    watcher.join()


def _exit_at_eof(control: IO[bytes]) -> None:
    # Only a line end or the end of the input arrives. The lock of a buffered read would outlive this thread.
    os.read(control.fileno(), 1)
    os._exit(0)


def _not_counted(sender: int, nbytes: int) -> None:
    pass


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    main(sys.stdin.buffer)
