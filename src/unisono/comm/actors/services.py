"""`Services` for workers that are processes: actors behind sockets, in these processes or in some of their own.

All workers of a run share a token: worker 0 makes it, and the communicator carries it or what it is made of. Where an
actor listens is told by the communicator as well, so no port has to be agreed on.
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
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.comm.abort import Abort
from unisono.comm.actor import Actor, ActorConnection, ActorMessage
from unisono.comm.actors.client import ActorAddress, Run, SocketConnection, connect_actor, directly
from unisono.comm.actors.handshake import TOKEN_BYTES
from unisono.comm.actors.listener import ActorListener, ListeningSockets
from unisono.comm.actors.message_stream import READY
from unisono.comm.actors.process import ServerProcess
from unisono.comm.actors.server import ActorServer
from unisono.comm.host import host_name
from unisono.comm.work import Work

_NOTE_BYTES = 512


class Verbs(Protocol):
    """What is needed of a communicator."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> Work[Tensor]:
        """As `Communicator.gather`."""

    def broadcast(self, x: Tensor, root: int = 0) -> Work[Tensor]:
        """As `Communicator.broadcast`."""


class ActorHost:
    """The actors that one worker hosts and has started, and its lines; the lanes of a communicator share it.

    Args:
        address: of this host, by which the peers reach it; nothing listens on any other.
        timeout_seconds: how long an actor may be silent.
        abort: breaks off what waits for actors.
        secret: the run's token, if there is one. The actors' token is then derived from it and from a nonce of worker
            0, so that it does not travel over the communicator.
        encrypted: whether messages between hosts are encrypted; they are authenticated in any case.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        timeout_seconds: float = 60.0,
        abort: Abort | None = None,
        secret: str = "",
        encrypted: bool = False,
    ) -> None:
        self._address, self._timeout_seconds = address, timeout_seconds
        self._secret, self._encrypted = secret, encrypted
        self._abort = abort or Abort()
        self._token = b""
        self._bytes_sent = 0
        self._lock = threading.Lock()
        self._open = ExitStack()

    @property
    def bytes_sent(self) -> int:
        """What has left this worker: its calls, and what the actor that it hosts says."""
        return self._bytes_sent

    def host(self, comm: Verbs, actor: Actor) -> list[ActorConnection]:
        """As `Services.host`."""
        token, rank = self._shared_token(comm), comm.rank
        desk = ActorServer(actor, rank, lambda sender, nbytes: self._count(sender not in (rank, -1 - rank), nbytes))
        doors = ListeningSockets.open(self._address)
        mine = ActorAddress(
            rank, f"actor of worker {rank}", rank, *doors.endpoint, os.getpid(), doors.nearby, host_name()
        )
        reception = ActorListener(doors.sockets, token, rank, desk.largest_bytes, desk.welcome, self._encrypted)
        self._open.callback(desk.close)
        self._open.callback(reception.close)
        places = _told(comm, [mine])
        lines = [self._connect(place, rank, directly, place.rank != rank) for place in places]
        desk.connected([self._connect(place, -1 - rank, desk.call_back, place.rank != rank) for place in places])
        ready = _ready(lines)
        comm.gather(torch.zeros(1)).wait()  # everybody has come in: what a lane opens now is its own
        return ready

    def serve(self, comm: Verbs, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """As `Services.serve`."""
        if count < 1:
            raise ValueError(f"count={count}: one server or more")
        token = self._shared_token(comm)
        processes: list[ServerProcess] = []
        mine: list[ActorAddress] = []
        for number in range(comm.rank, count, comm.size):
            with closing(ListeningSockets.open(self._address)) as doors:
                order = {
                    **{"number": number, "service": service, "config": dict(config), "token": token.hex()},
                    **{"timeout_seconds": self._timeout_seconds, "encrypted": self._encrypted},
                }
                process = ServerProcess(order, doors.sockets)
                self._open.callback(process.close)
                address, port = doors.endpoint
                place = ActorAddress(
                    number, f"server {number}", comm.rank, address, port, process.pid, doors.nearby, host_name()
                )
            processes.append(process)
            mine.append(place)
        places = sorted(_told(comm, mine, -(-count // comm.size)), key=lambda place: place.number)
        for process in processes:
            process.tell_places(places)
        lines = [self._connect(place, comm.rank, directly, True) for place in places]
        return _ready(lines)

    def close(self) -> None:
        """End the lines, the actors and the processes. May be called twice."""
        self._open.close()

    def _connect(self, place: ActorAddress, sender: int, run: Run, leaves: bool) -> SocketConnection:
        count = partial(self._count, leaves)
        line = connect_actor(place, self._token, sender, self._timeout_seconds, count, run, self._abort)
        self._open.callback(self._abort.add_callback(lambda: line.break_off(self._abort.reason)))
        self._open.callback(line.close)
        return line

    def _count(self, leaves: bool, nbytes: int) -> None:
        if leaves:
            with self._lock:
                self._bytes_sent += nbytes

    def _shared_token(self, comm: Verbs) -> bytes:
        if not self._token:
            chosen = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8)
            token = bytes(comm.broadcast(chosen, 0).wait().tolist())
            self._token = hmac.digest(self._secret.encode(), token, "sha256") if self._secret else token
        return self._token


def _ready(lines: Sequence[SocketConnection]) -> list[ActorConnection]:
    """`lines`, when all actors have met: from here on, who is lost is lost to one that goes on."""
    for call in [line.call(ActorMessage(READY)) for line in lines]:
        call.wait()
    return list(lines)


def _told(comm: Verbs, mine: Sequence[ActorAddress], rows: int = 1) -> list[ActorAddress]:
    """Everybody's places, at most `rows` of each worker."""
    notes = torch.zeros(rows, _NOTE_BYTES, dtype=torch.uint8)
    for row, place in zip(notes, mine, strict=False):
        text = json.dumps(vars(place)).encode()
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everybody = comm.gather(notes).wait().view(-1, _NOTE_BYTES)
    texts = [bytes(row.tolist()).rstrip(b"\0") for row in everybody]
    return [ActorAddress(**json.loads(text)) for text in texts if text]
