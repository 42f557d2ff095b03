"""The kinds of stores by MXNet's names, and how one is created."""

from __future__ import annotations

from unisono.comm import SingleWorker
from unisono.errors import InvalidInput
from unisono.kvstore.store import KVStore, StoreType
from unisono.tasks.checks import check_whole
from unisono.world import World, join

_ALL = [
    StoreType("local"),
    StoreType("device", on_device=True),
    StoreType("dist_sync", distributed=True),
    StoreType("dist_async", distributed=True, synchronous=False),
    *(StoreType(name, distributed=True, on_device=True) for name in ("dist_device_sync", "dist_sync_device")),
    *(
        StoreType(name, distributed=True, synchronous=False, on_device=True)
        for name in ("dist_device_async", "dist_async_device")
    ),
]
TYPES = {kind.name: kind for kind in _ALL}
"""The types by their names in MXNet."""
REFUSED = {
    "nccl": ("the stored values are in host memory", "use 'device'"),
    "horovod": ("it has no store, only sums", "use 'dist_sync', or unisono.join() and world.bind()"),
    "byteps": ("it has no store, only sums", "use 'dist_sync', or unisono.join() and world.bind()"),
    "p3": ("priorities have no effect here", "use 'dist_sync'"),
}
"""Types of MXNet that have no meaning here: why, and what to use."""


def create(name: str = "local", *, world: World | None = None, bigarray_bound: int = 1_000_000) -> KVStore:
    """Collective in the distributed types: a new store.

        local               of one process; arrays are added in host memory
        device              of one process; arrays are added on the first one's device
        dist_sync           of all workers; a push is applied with those of all others
        dist_async          of all workers; a push is applied as it comes
        dist_device_sync    as ``dist_sync``, and ``device`` inside a worker; also dist_sync_device
        dist_device_async   as ``dist_async``, and ``device`` inside a worker; also dist_async_device

    Each worker of a distributed store stores a part of the values, and the whole of none that is large. So a script
    ends with `KVStore.close`, or has the store in a ``with``.

    Args:
        world: of `unisono.join`, if the script has called that. Without it, a distributed type joins the run.
        bigarray_bound: elements from which on a value is divided among all workers.

    Raises:
        InvalidInput: there is no such type, or one that has no meaning here.
        PeerLost: other workers did not connect.
    """
    check_whole("bigarray_bound", bigarray_bound, 1)
    kind = TYPES.get(name.lower()) if isinstance(name, str) else None
    if kind is None:
        problem, cure = REFUSED.get(str(name).lower(), ("there is no such type", f"use one of {', '.join(TYPES)}"))
        raise InvalidInput("name", name, problem, cure)
    if not kind.distributed:
        return KVStore(kind, SingleWorker(), bigarray_bound=bigarray_bound)
    if world is not None:
        return KVStore(kind, world.comm, bigarray_bound=bigarray_bound)
    joined = join()
    return KVStore(kind, joined.comm, bigarray_bound=bigarray_bound, leave=joined.close)
