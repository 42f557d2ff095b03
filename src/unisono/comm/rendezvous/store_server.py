"""A rendezvous store that a worker offers: a directory of its host, or a store that it serves itself."""

from __future__ import annotations

from urllib.parse import urlsplit

from unisono.comm.rendezvous.address import RendezvousAddress, own_address, parse_rendezvous
from unisono.comm.rendezvous.token_store import StoreServer
from unisono.errors import InvalidInput


class RendezvousStore:
    """A store that serves any number of rendezvous, one after the other, until it is closed.

    Attributes:
        url: the store's URL, see `unisono.comm.rendezvous.address`; `for_attempt` adds the number of a rendezvous.
    """

    def __init__(self, url: str, server: StoreServer | None = None) -> None:
        self.url, self._server = url, server

    def close(self) -> None:
        """End the store if this worker serves it. May be called twice."""
        if self._server is not None:
            self._server.close()


def open_store(url: str, towards: str, token: str) -> RendezvousStore:
    """The store at `url`; if `url` is empty, a store that this worker serves.

    A store that this worker serves is open to processes that know `token`. It listens on a free port of the address by
    which this host reaches the URL `towards`, and on no other address.

    Raises:
        InvalidInput: `url` is not the URL of a rendezvous, or `towards` has no host.
    """
    if url:
        parse_rendezvous(url)
        return RendezvousStore(url)
    parts = urlsplit(towards)
    if not parts.hostname:
        raise InvalidInput("towards", towards, "has no host", "write http://host:port")
    address = own_address(RendezvousAddress(host=parts.hostname, port=parts.port or 80))
    server = StoreServer(address, token)
    shown = f"[{address}]" if ":" in address else address
    return RendezvousStore(f"tcp://{shown}:{server.port}?served=1", server)
