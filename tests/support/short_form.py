"""Chooses the rows of a long table for its short form; arithmetic without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, int]
"""Of each argument of a test, the place of its value among those that the argument has."""


def short_form(rows: Sequence[Row], most: int) -> set[int]:
    """The numbers of up to `most` of `rows`: each next one has the most values that those before do not have."""
    kept: list[int] = []
    seen: set[tuple[str, int]] = set()
    for _ in range(min(most, len(rows))):
        new = [-1 if i in kept else len(row.items() - seen) for i, row in enumerate(rows)]
        best = [i for i, count in enumerate(new) if count == max(new)]
        kept.append(best[len(best) * len(kept) // most])  # of equals not the neighbours, which are alike
        seen |= rows[kept[-1]].items()
    return set(kept)
