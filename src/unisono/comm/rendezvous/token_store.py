"""A store that only processes with the run's token can use, for a rendezvous of several hosts.

The store is an actor: a connection is accepted after the handshake of `unisono.comm.actors.handshake`, and every
message is encrypted and authenticated. So other processes cannot exhaust memory or descriptors of the process that
serves the store.
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
_NUMBER_BITS = 62  # of a client's random number: of 10^9 runs with 10^5 workers, about one has two equal numbers


class StoreServer:
    """Serves one store to processes that know `token`, on a free `port` of `address` and of no other address."""

    def __init__(self, address: str, token: str) -> None:
        self._server = ActorServer(_Keys(), 0, lambda sender, nbytes: None)
        self._server.connected([])
        sock = listen(address)
        self.port: int = sock.getsockname()[1]
        self._listener = ActorListener([sock], _key(token), 0, _LARGEST_BYTES, self._server.accept, encrypted=True)

    def close(self) -> None:
        """End all connections. May be called twice."""
        self._listener.close()
        self._server.close()


class TokenStore(c10d.Store):
    """A client of the `StoreServer` at `address` and `port`; garbage collection ends the connection.

    Args:
        timeout_seconds: how long `get` and `wait` wait for a key, and every call for an answer.
        abort: once set, ends that waiting.

    Raises:
        PeerLost: no process that knows the token serves the store.
    """

    def __init__(self, address: str, port: int, token: str, timeout_seconds: float, abort: Abort) -> None:
        super().__init__()
        self._timeout_seconds, self._abort = timeout_seconds, abort
        server = ActorAddress(0, f"the store at {address}:{port}", 0, address, port, 0)
        number = secrets.randbits(_NUMBER_BITS)
        self._connection = connect_actor(server, _key(token), number, timeout_seconds, abort=abort)
        forget = abort.add_callback(_aborter(self._connection, abort))
        weakref.finalize(self, _close, forget, self._connection)

    def set(self, key: str, value: Any) -> None:
        """See torch's ``c10d.Store.set``. Raises `PeerLost` if the server has ended."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call(ActorMessage("set", {"key": key, "value": data.hex()}))

    def get(self, key: str) -> bytes:
        """See torch's ``c10d.Store.get``. Raises `PeerLost` if there is no value in time, or the server ended."""
        self.wait([key])
        return bytes.fromhex(self._call(ActorMessage("get", {"key": key}))["value"])

    def check(self, keys: list[str]) -> bool:
        """See torch's ``c10d.Store.check``. Raises `PeerLost` if the server has ended."""
        return bool(self._call(ActorMessage("check", {"keys": keys}))["found"])

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """See torch's ``c10d.Store.wait``. `timeout` is ignored: the deadline is that of this store."""
        await_keys(self, [(-1, key) for key in keys], self._timeout_seconds, self._abort)

    def _call(self, message: ActorMessage) -> dict[str, Any]:
        return dict(self._connection.call(message).wait().fields)


class _Keys:
    """The actor that is the store: keys and values in a dictionary."""

    largest_bytes = _LARGEST_BYTES

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def connected(self, peers: Sequence[ActorConnection]) -> None:
        """A store has no peers."""

    def lost(self, sender: int) -> None:
        """Keep what `sender` has written."""

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
    """The token of the handshake, derived from the run's `token`; the run's other actors have a different one."""
    return hmac.digest(token.encode(), b"unisono rendezvous", "sha256")


def _aborter(connection: SocketConnection, abort: Abort) -> Any:
    return lambda: connection.abort(abort.reason)


def _close(forget: Any, connection: SocketConnection) -> None:
    forget()
    connection.close()
