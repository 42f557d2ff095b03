"""The styles in which a matrix can be split, and a mapping of module names to them as a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

COLUMN, ROW, VOCABULARY = "column", "row", "vocabulary"
GATHERED, SCATTERED = "column gathered", "row scattered"
THIRDS, HALVES = "column of thirds", "column of halves"
GROUPS = {THIRDS: 3, HALVES: 2}
STYLES = (COLUMN, ROW, VOCABULARY, GATHERED, SCATTERED, THIRDS, HALVES)
COLUMNS = (COLUMN, THIRDS, HALVES)
ROWS = (ROW, SCATTERED)


class StyleMapping(Mapping[str, str]):
    """An immutable, hashable mapping from module names or name patterns to split styles.

    Equality ignores the order of entries. The repr is that of a dict.
    """

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        self._words = dict(words or {})

    def __getitem__(self, name: str) -> str:
        return self._words[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)

    def __hash__(self) -> int:
        return hash(frozenset(self._words.items()))

    def __repr__(self) -> str:
        return repr(self._words)
