"""Decides which requests are executed next, in an order that all workers share. Arithmetic, without I/O.

Workers submit requests in orders of their own. A request is executed once all members of its process set that have not
joined have submitted it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.horovod.requests import (
    ADD_SET,
    ADDITIVE,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    EVERYBODY,
    FIX_ORDER,
    JOIN,
    REMOVE_SET,
    Agreed,
    Key,
    Request,
    difference,
    part,
)


class Agreement:
    """The requests that wait for other workers, the process sets, and which workers have joined.

    Args:
        size: the number of workers.
    """

    def __init__(self, size: int) -> None:
        self._sets: dict[int, tuple[int, ...]] = {EVERYBODY: tuple(range(size))}
        self._sets_so_far = 1
        self._submitted: dict[Key, dict[int, Request]] = {}
        self._joined: list[int] = []
        self._gone: set[int] = set()

    def submit(self, rank: int, requests: Sequence[Request]) -> list[Agreed]:
        """Worker `rank` submits `requests`; returns what is agreed on with them.

        Raises:
            ValueError: a request that a worker of this program does not submit.
        """
        agreed: list[Agreed] = []
        for request in requests:
            if request.verb == JOIN:
                agreed += self._join(rank, request)
                continue
            if rank not in self._sets.get(request.members, ()):
                raise ValueError(f"worker {rank} is not in process set {request.members}")
            waiting = self._submitted.setdefault(request.key, {})
            if rank in waiting:
                raise ValueError(f"worker {rank} submits {request.name} twice")
            waiting[rank] = request
            agreed += self._complete([request.key])
        return agreed

    def leave(self, rank: int) -> list[Agreed]:
        """Worker `rank` submits nothing any more; returns what fails with it."""
        self._gone.add(rank)
        return self._complete(list(self._submitted))

    def missing(self, key: Key) -> list[int]:
        """The workers that a request waits for."""
        waiting = self._submitted.get(key, {})
        return [r for r in self._sets.get(key[0], ()) if r not in waiting and r not in self._joined] if waiting else []

    def _join(self, rank: int, request: Request) -> list[Agreed]:
        self._joined.append(rank)
        agreed = self._complete(list(self._submitted))
        if len(self._joined) == len(self._sets[EVERYBODY]):
            agreed.append(Agreed(request, result=rank))
            self._joined.clear()
        return agreed

    def _complete(self, keys: Iterable[Key]) -> list[Agreed]:
        """Those of `keys` that wait for no worker any more."""
        agreed = []
        for key in keys:
            # All workers take part in the operations of every process set, so none can do without one.
            if self._gone:
                workers = ", ".join(map(str, sorted(self._gone)))
                error = f"{key[1]}: worker {workers} has shut down or is lost"
                agreed.append(Agreed(next(iter(self._submitted.pop(key).values())), error=error, lost=True))
            elif not self.missing(key):
                agreed.append(self._agree(self._submitted.pop(key)))
        return agreed

    def _agree(self, submitted: dict[int, Request]) -> Agreed:
        by_rank = dict(sorted(submitted.items()))
        request = next(iter(by_rank.values()))
        error = difference(by_rank) or self._refused(request, len(by_rank))
        if error:
            return Agreed(request, error=error)
        result = -1
        if request.verb == BROADCAST:
            result = self._sets[request.members].index(request.root)
        if request.verb == ADD_SET:
            result, self._sets_so_far = self._sets_so_far, self._sets_so_far + 1
            self._sets[result] = request.numbers
        if request.verb == REMOVE_SET:
            self._sets.pop(request.numbers[0], None)
        parts = tuple(part(each) for each in by_rank.values())
        if request.verb == FIX_ORDER:
            everybody = len(parts) == len(self._sets[EVERYBODY])
            result = int(everybody and len({digest for digest, *_ in parts}) == 1)
        return Agreed(request, parts, result=result)

    def _refused(self, request: Request, submitted: int) -> str:
        """Why `request` cannot be executed, although all workers have submitted the same, or have joined."""
        if request.verb == BROADCAST and request.root not in self._sets[request.members]:
            return f"{request.name}: root_rank {request.root} is not in the process set; name one of its ranks"
        if submitted == len(self._sets[request.members]) or request.verb in (BARRIER, FIX_ORDER):
            return ""
        if request.verb == ALLREDUCE and request.op in ADDITIVE:
            return ""
        what = f"{request.verb} with op {request.op}" if request.op else request.verb
        return f"{request.name}: {what} has no value of a worker that has joined; call it before any worker joins"
