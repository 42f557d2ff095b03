"""Where others can meet a worker: a place of all workers of a host, or a door that it opens itself."""

from __future__ import annotations

from urllib.parse import urlsplit

from unisono.comm.rendezvous.address import RendezvousAddress, own_address, parse_rendezvous
from unisono.comm.rendezvous.token_store import StoreServer
from unisono.errors import InvalidInput


class RendezvousStore:
    """A meeting place, as long as it is open.

    Attributes:
        url: see `unisono.comm.rendezvous.address`; `for_attempt` makes it that of one of many meetings.
    """

    def __init__(self, url: str, server: StoreServer | None = None) -> None:
        self.url, self._server = url, server

    def close(self) -> None:
        """Nobody can meet here any more, if it was this worker who served. May be called twice."""
        if self._server is not None:
            self._server.close()


def open_store(meets_at: str, towards: str, token: str) -> RendezvousStore:
    """The place `meets_at`, or, where that is empty, one that this worker serves to whoever knows `token`, on a free
    port of the address by which `towards` is reached, and on no other.

    Raises:
        InvalidInput: `meets_at` is no place, or `towards` no URL with a host.
    """
    if meets_at:
        parse_rendezvous(meets_at)
        return RendezvousStore(meets_at)
    parts = urlsplit(towards)
    if not parts.hostname:
        raise InvalidInput("towards", towards, "has no host", "write http://host:port")
    address = own_address(RendezvousAddress(host=parts.hostname, port=parts.port or 80))
    server = StoreServer(address, token)
    shown = f"[{address}]" if ":" in address else address
    return RendezvousStore(f"tcp://{shown}:{server.port}?served=1", server)
