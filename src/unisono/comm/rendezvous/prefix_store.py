"""A store whose keys have a prefix."""

from __future__ import annotations

from torch._C import _distributed_c10d as c10d


class PrefixedStore(c10d.PrefixStore):
    """A view of `store` whose keys begin with ``prefix/``.

    torch's class refers to the C++ part of `store` only: a store written in Python would lose its methods with the
    last Python reference to it. This class keeps such a reference.
    """

    def __init__(self, prefix: str, store: c10d.Store) -> None:
        super().__init__(prefix, store)
        self._store = store
