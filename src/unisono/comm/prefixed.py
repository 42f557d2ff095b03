"""Keys of a store under a prefix."""

from __future__ import annotations

from torch._C import _distributed_c10d as c10d


class Prefixed(c10d.PrefixStore):
    """`store` for keys that begin with ``prefix/``. torch's own keeps only what C++ knows of `store`; where that is
    written in Python, it could not be called any more once nobody else keeps it."""

    def __init__(self, prefix: str, store: c10d.Store) -> None:
        super().__init__(prefix, store)
        self._kept = store
