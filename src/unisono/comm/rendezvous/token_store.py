"""A store that only processes with the run's token can reach, for a rendezvous of several hosts.

It is an actor: a connection is accepted after the handshake of `unisono.comm.actors.handshake`, and every message is
encrypted and authenticated. So the memory and descriptors of its process do not grow by what other processes send.
"""

from __future__ import annotations

import hmac
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.comm.actor import ActorConnection, ActorMessage, Answer
from unisono.comm.actors.client import ActorAddress, SocketConnection, connect_actor
from unisono.comm.actors.listener import ActorListener, listen
from unisono.comm.actors.server import ActorServer
from unisono.comm.rendezvous.store_exchange import await_keys

_LARGEST_BYTES = 1 << 20
_NUMBER_BITS = 62  # of a client: two of them have the same number once in 10^9 runs of 10^5 workers


class StoreServer:
    """Serves the keys of one store to all who know `token`, on a free port of `address` and no other.

    Attributes:
        port: that port.
    """

    def __init__(self, address: str, token: str) -> None:
        self._desk = ActorServer(_Keys(), 0, lambda sender, nbytes: None)
        self._desk.connected([])
        door = listen(address)
        self.port: int = door.getsockname()[1]
        self._reception = ActorListener([door], _key(token), 0, _LARGEST_BYTES, self._desk.welcome, encrypted=True)

    def close(self) -> None:
        """Nobody is served any more. May be called twice."""
        self._reception.close()
        self._desk.close()


class TokenStore(c10d.Store):
    """The store that a `StoreServer` serves at `address` and `port`, for as long as something refers to this.

    Args:
        timeout_seconds: how long `get` and `wait` wait for a key, and every call for an answer.
        abort: ends that waiting.

    Raises:
        PeerLost: nobody who knows the token serves there.
    """

    def __init__(self, address: str, port: int, token: str, timeout_seconds: float, abort: Abort) -> None:
        super().__init__()
        self._timeout_seconds, self._abort = timeout_seconds, abort
        place = ActorAddress(0, f"the store at {address}:{port}", 0, address, port, 0)
        number = secrets.randbits(_NUMBER_BITS)
        self._line = connect_actor(place, _key(token), number, timeout_seconds, abort=abort)
        forget = abort.add_callback(_breaking(self._line, abort))
        weakref.finalize(self, _end, forget, self._line)

    def set(self, key: str, value: Any) -> None:
        """As torch's. Raises `PeerLost` where the server is gone."""
        said = value.encode() if isinstance(value, str) else bytes(value)
        self._asked(ActorMessage("set", {"key": key, "value": said.hex()}))

    def get(self, key: str) -> bytes:
        """As torch's. Raises `PeerLost` where no value comes before the deadline, or the server is gone."""
        self.wait([key])
        return bytes.fromhex(self._asked(ActorMessage("get", {"key": key}))["value"])

    def check(self, keys: list[str]) -> bool:
        """As torch's. Raises `PeerLost` where the server is gone."""
        return bool(self._asked(ActorMessage("check", {"keys": keys}))["found"])

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """As torch's, but that the deadline is this store's own."""
        await_keys(self, [(-1, key) for key in keys], self._timeout_seconds, self._abort)

    def _asked(self, message: ActorMessage) -> dict[str, Any]:
        return dict(self._line.call(message).wait().fields)


class _Keys:
    """The actor."""

    largest_bytes = _LARGEST_BYTES

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def connected(self, lines: Sequence[ActorConnection]) -> None:
        """There is one."""

    def lost(self, sender: int) -> None:
        """What it has written stays."""

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        fields = message.fields
        match message.kind:
            case "set":
                self._values[fields["key"]] = fields["value"]
                answer(ActorMessage("done"))
            case "check":
                answer(ActorMessage("checked", {"found": all(key in self._values for key in fields["keys"])}))
            case "get":
                answer(ActorMessage("value", {"value": self._values[fields["key"]]}))
            case _:
                raise ValueError(f"a store does not know {message.kind!r}")


def _key(token: str) -> bytes:
    """The handshake's: it is not that of the run's other actors."""
    return hmac.digest(token.encode(), b"unisono rendezvous", "sha256")


def _breaking(line: SocketConnection, abort: Abort) -> Any:
    return lambda: line.break_off(abort.reason)


def _end(forget: Any, line: SocketConnection) -> None:
    forget()
    line.close()
