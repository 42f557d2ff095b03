"""`Services` for workers that are processes: actors behind sockets, in these processes or in processes of their own.

All workers of a run share a token: worker 0 draws it, and the communicator broadcasts it, or the nonce from which it is
derived. The communicator also gathers the addresses of all actors, so no port has to be agreed on.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch

from unisono.comm.abort import Abort
from unisono.comm.actor import Actor, ActorConnection, ActorMessage
from unisono.comm.actors.client import ActorAddress, Run, SocketConnection, connect_actor, directly
from unisono.comm.actors.handshake import TOKEN_BYTES
from unisono.comm.actors.listener import ActorListener, ListeningSockets
from unisono.comm.actors.message_stream import READY
from unisono.comm.actors.process import ServerProcess
from unisono.comm.actors.server import ActorServer
from unisono.comm.communicator import Communicator
from unisono.comm.host import host_name
from unisono.comm.security import Security
from unisono.comm.text import gather_text


class ActorHost:
    """The actors that one worker hosts or has started, and its connections; all channels of a communicator share it.

    Args:
        address: the address of this host, as its peers reach it; actors listen on no other address.
        timeout_seconds: how long to wait for an answer.
        abort: once set, all waiting for actors ends.
        security: the secret of the run. If it has a token, the actors' token is derived from that token and from a
            nonce of worker 0; the communicator then transfers the nonce only.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        timeout_seconds: float = 60.0,
        abort: Abort | None = None,
        security: Security | None = None,
    ) -> None:
        self._address, self._timeout_seconds = address, timeout_seconds
        self._security = security or Security()
        self._abort = abort or Abort()
        self._token = b""
        self._bytes_sent = 0
        self._lock = threading.Lock()
        self._open = ExitStack()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this worker: its calls, and the answers of the actor that it hosts."""
        return self._bytes_sent

    def host(self, comm: Communicator, actor: Actor) -> list[ActorConnection]:
        """See `Services.host`."""
        token, rank = self._shared_token(comm), comm.rank
        server = ActorServer(actor, rank, lambda sender, nbytes: self._count(sender not in (rank, -1 - rank), nbytes))
        listening = ListeningSockets.open(self._address)
        own = ActorAddress(
            rank, f"actor of worker {rank}", rank, *listening.endpoint, os.getpid(), listening.nearby, host_name()
        )
        listener = ActorListener(
            listening.sockets, token, rank, server.largest_bytes, server.accept, self._security.encrypted
        )
        self._open.callback(server.close)
        self._open.callback(listener.close)
        addresses = _gather_addresses(comm, [own])
        connections = [self._connect(address, rank, directly, address.rank != rank) for address in addresses]
        server.connected(
            [self._connect(address, -1 - rank, server.call_back, address.rank != rank) for address in addresses]
        )
        ready = _wait_ready(connections)
        # All workers are connected: sockets that another channel opens from here on cannot be mistaken for these.
        comm.gather(torch.zeros(1)).wait()
        return ready

    def serve(self, comm: Communicator, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """See `Services.serve`."""
        if count < 1:
            raise ValueError(f"count={count}: there must be at least one server")
        token = self._shared_token(comm)
        processes: list[ServerProcess] = []
        own: list[ActorAddress] = []
        for number in range(comm.rank, count, comm.size):
            with closing(ListeningSockets.open(self._address)) as listening:
                start_message = {
                    **{"number": number, "service": service, "config": dict(config), "token": token.hex()},
                    **{"timeout_seconds": self._timeout_seconds, "encrypted": self._security.encrypted},
                }
                process = ServerProcess(start_message, listening.sockets)
                self._open.callback(process.close)
                name, nearby = f"server {number}", listening.nearby
                own.append(ActorAddress(number, name, comm.rank, *listening.endpoint, process.pid, nearby, host_name()))
            processes.append(process)
        addresses = sorted(_gather_addresses(comm, own), key=lambda address: address.number)
        for process in processes:
            process.send_addresses(addresses)
        connections = [self._connect(address, comm.rank, directly, True) for address in addresses]
        return _wait_ready(connections)

    def close(self) -> None:
        """End the connections, the actors and their processes. May be called twice."""
        self._open.close()

    def _connect(self, address: ActorAddress, sender: int, run: Run, counts: bool) -> SocketConnection:
        count = partial(self._count, counts)
        connection = connect_actor(address, self._token, sender, self._timeout_seconds, count, run, self._abort)
        self._open.callback(self._abort.add_callback(lambda: connection.abort(self._abort.reason)))
        self._open.callback(connection.close)
        return connection

    def _count(self, counts: bool, nbytes: int) -> None:
        if counts:
            with self._lock:
                self._bytes_sent += nbytes

    def _shared_token(self, comm: Communicator) -> bytes:
        if not self._token:
            drawn = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
            nonce = bytes(comm.broadcast(drawn, 0).wait().tolist())
            secret = self._security.token.encode()
            self._token = hmac.digest(secret, nonce, "sha256") if secret else nonce
        return self._token


def _wait_ready(connections: Sequence[SocketConnection]) -> list[ActorConnection]:
    """`connections`, once all actors are connected with each other, so that each notices the loss of a peer."""
    for call in [connection.call(ActorMessage(READY)) for connection in connections]:
        call.wait()
    return list(connections)


def _gather_addresses(comm: Communicator, own: Sequence[ActorAddress]) -> list[ActorAddress]:
    """Collective: the addresses of the actors of all workers."""
    texts = gather_text(comm, json.dumps([vars(address) for address in own]))
    return [ActorAddress(**fields) for text in texts for fields in json.loads(text)]
