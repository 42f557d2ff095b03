"""Process sets: some of the workers, to which a collective operation can be restricted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.horovod.errors import InvalidArgument
from unisono.horovod.participant import current, is_initialized
from unisono.horovod.requests import ADD_SET, EVERYBODY, REMOVE_SET


class ProcessSet:
    """The workers with the global `ranks`. It can be used once `init` or `add_process_set` was called with it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        given = list(ranks)
        if wrong := [rank for rank in given if type(rank) is not int or rank < 0]:
            raise InvalidArgument("ranks", wrong[0], "is not a rank", "give whole numbers from 0")
        self._ranks = tuple(sorted(set(given)))
        self._added: tuple[dict[int, tuple[int, ...]], int] | None = None

    @property
    def process_set_id(self) -> int | None:
        """Its number, the same on all workers; None where it cannot be used."""
        if self._added is None or not is_initialized():
            return None
        sets, number = self._added
        return number if sets is current().process_sets and number in sets else None

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks of its members, ascending; None where they are not known yet."""
        return list(self._ranks)

    def size(self) -> int | None:
        """The number of members; None where it cannot be used."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """This worker's number among the members; None where the set cannot be used.

        Raises:
            InvalidArgument: this worker is no member.
        """
        return None if self.process_set_id is None else membership(self)[1].index(current().rank)

    def included(self) -> bool | None:
        """Whether this worker is a member; None where that is not known yet."""
        return None if self.ranks is None else current().rank in self.ranks

    def mark_added(self, number: int) -> None:
        """All workers have added it, as `number`."""
        self._added = current().process_sets, number

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _AllWorkers(ProcessSet):
    """The set of all workers, from `init` to `shutdown`."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def process_set_id(self) -> int | None:
        return EVERYBODY

    @property
    def ranks(self) -> list[int] | None:
        return list(range(current().size)) if is_initialized() else None


global_process_set = _AllWorkers()


def membership(process_set: ProcessSet) -> tuple[int, list[int]]:
    """The number and the ranks of a set that this worker is a member of.

    Raises:
        InvalidArgument: it is no member, or the set was not added.
    """
    number, ranks, own = process_set.process_set_id, process_set.ranks or [], current().rank
    if number is None:
        raise InvalidArgument("process_set", ranks, "it was not added, or was removed",
                              "call hvd.add_process_set on all workers")  # fmt: skip
    if own not in ranks:
        raise InvalidArgument("process_set", ranks, f"worker {own} is not in it", "check process_set.included() first")
    return number, ranks


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Collective: all workers, members or not, add the same set, which can then be used.

    Raises:
        InvalidArgument: there is a set with the same ranks, or a rank is not that of a worker.
        HorovodInternalError: workers add different sets.
    """
    added, own = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set), current()
    ranks = tuple(added.ranks or ())
    if beyond := [rank for rank in ranks if rank >= own.size]:
        raise InvalidArgument("ranks", beyond[0], f"there are {own.size} workers",
                              f"give ranks up to {own.size - 1}")  # fmt: skip
    if ranks in own.process_sets.values() or ranks == tuple(range(own.size)):
        raise InvalidArgument("process_set", list(ranks), "there is such a set already", "use that one")
    number = own.agree(ADD_SET, None, numbers=ranks)
    own.process_sets[number] = ranks
    added.mark_added(number)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Collective: all workers remove the same set; returns whether it is one that can be removed."""
    own, number = current(), process_set.process_set_id
    if number is None or number == EVERYBODY:
        return False
    own.agree(REMOVE_SET, None, numbers=(number,))
    del own.process_sets[number]
    return True
