"""Selects the operations of a tape that are needed, and an order in which they need little memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from unisono.layout.deferred.tape import Tape


@dataclass(frozen=True)
class NeededOperations:
    """The operations that a replay needs, by number.

    Args:
        live: operations whose results are needed.
        drawn: operations that must draw their random numbers, whether or not the numbers are needed.
    """

    live: set[int]
    drawn: set[int]


def needed(tape: Tape, storages: Iterable[int], after: Iterable[int]) -> NeededOperations:
    """The operations for the final content of `storages` and for the generators' states after the draws `after`."""
    live: set[int] = set()
    drawn: set[int] = set()
    values = [(storage, len(tape.operations)) for storage in storages]
    draws = [operation for operation in after if operation not in tape.states]
    while values or draws:
        if draws:
            number = draws.pop()
            if number in drawn:
                continue
            drawn.add(number)
            draw = tape.operations[number].draw
            if draw is not None and isinstance(draw.start, int) and draw.start not in tape.states:
                draws.append(draw.start)
            if not tape.operations[number].reads:
                continue  # the number of draws depends on no tensor, so a blank result is enough
        else:
            storage, before = values.pop()
            writer = tape.last_writer(storage, before)
            if writer is None:
                continue
            number = writer
        if number not in live:
            live.add(number)
            values += [(storage, number) for storage in tape.operations[number].reads]
            if tape.operations[number].draw is not None:
                draws.append(number)
    return NeededOperations(live, drawn)


def schedule(tape: Tape, work: NeededOperations, wanted: Iterable[int]) -> list[int]:
    """All operations of `work` in an order that gives the same bits as the recorded order.

    Draws keep their order. All other operations run when something needs them. A wanted storage is final directly after
    the last draw that it depends on, even if the build wrote to it much later.
    """
    parents = _parents(tape, work.live)
    clock: dict[int, int] = {}  # the last draw that must precede the operation
    for number in sorted(work.live | work.drawn):
        waits = (clock[parent] for parent in parents.get(number, ()))
        clock[number] = number if number in work.drawn else max(waits, default=-1)
    due: dict[int, list[list[int]]] = defaultdict(list)
    for storage in wanted:
        writers = [writer for writer in tape.writers[storage] if writer in work.live]
        due[max((clock[writer] for writer in writers), default=-1)].append(writers)
    order: list[int] = []
    done: set[int] = set()
    for draw in (-1, *sorted(work.drawn)):
        for goal in ([draw] if draw >= 0 else [], *due[draw]):
            order += sorted(_missing(goal, parents, done))
    return order


def _missing(goal: Iterable[int], parents: dict[int, set[int]], done: set[int]) -> list[int]:
    """The operations that `goal` needs and that are not in `done`; adds them to `done`."""
    found, stack = [], list(goal)
    while stack:
        number = stack.pop()
        if number not in done:
            done.add(number)
            found.append(number)
            stack += parents.get(number, ())
    return found


def _parents(tape: Tape, live: set[int]) -> dict[int, set[int]]:
    """For each live operation, its predecessors: the writers of what it reads, and the readers of what it
    overwrites."""
    parents: dict[int, set[int]] = {}
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = defaultdict(set)
    for number in sorted(live):
        operation = tape.operations[number]
        before = {writer[storage] for storage in operation.reads | operation.writes if storage in writer}
        before.update(*(readers[storage] for storage in operation.writes))
        parents[number] = before
        for storage in operation.reads:
            readers[storage].add(number)
        for storage in operation.writes:
            writer[storage], readers[storage] = number, set()
    return parents
