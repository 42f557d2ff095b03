"""Keys of a store under a prefix."""

from __future__ import annotations

from torch._C import _distributed_c10d as c10d


class PrefixedStore(c10d.PrefixStore):
    """`store` for keys that begin with ``prefix/``. torch's own holds a reference to the C++ part of `store` alone. A
    store written in Python would lose its methods as soon as its last Python reference goes; this keeps one."""

    def __init__(self, prefix: str, store: c10d.Store) -> None:
        super().__init__(prefix, store)
        self._kept = store
