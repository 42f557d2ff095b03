"""Clients that connect to an actor server, and leave it."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from tests.support.actors import Echo
from unisono.comm import ActorMessage
from unisono.comm.actors import wire_format
from unisono.comm.actors.handshake import ConnectionTerms, TrustedConnection
from unisono.comm.actors.protection import Direction, Protection
from unisono.comm.actors.server import ActorServer


class SlowToGrasp(Echo):
    """Takes its time over the news that somebody is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.grasped = threading.Event(), threading.Event()

    def lost(self, sender: int) -> None:
        self.told.set()
        self.grasped.wait()
        super().lost(sender)


def bare(sock: socket.socket) -> TrustedConnection:
    """A connection as it is between processes of one host."""
    return TrustedConnection(sock, ConnectionTerms(1 << 20, Protection.NONE), Direction(), Direction())


def test_a_client_that_sees_its_connection_end_may_connect_again_at_once() -> None:
    actor = SlowToGrasp()
    server = ActorServer(actor, 0, lambda sender, nbytes: None)
    server.connected([])
    ours, theirs = socket.socketpair()
    ours.settimeout(10.0)
    server.accept(bare(theirs), 7)
    ours.sendall(bytes(64))  # a message it is not
    assert actor.told.wait(10.0)
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):  # the end is not to be seen before the actor knows of it
        ours.recv(1)
    ours.settimeout(10.0)
    actor.grasped.set()
    with closing(ours):
        assert ours.recv(1) == b""
    again, theirs = socket.socketpair()
    again.settimeout(10.0)
    with closing(again):
        server.accept(bare(theirs), 7)
        again.sendall(b"".join(wire_format.encode(ActorMessage("value"))))
        assert again.recv(4) == b"uni2"
    server.close()
