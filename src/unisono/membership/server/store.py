"""The coordinator's decisions on disk: one SQLite file that only its owner can read."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from unisono.membership.coordinator import Decision, SavedViews, ViewEnded, ViewFormed, join_names
from unisono.membership.messages import VIEW
from unisono.membership.protocol import ViewStatus

_SCHEMA = """
create table if not exists decided (one integer primary key check (one = 1), over text not null);
create table if not exists views (number integer primary key, said text not null);
create table if not exists ordered (one integer primary key check (one = 1), told text not null);
create table if not exists shared (one integer primary key check (one = 1), traits text not null);
create table if not exists happened (number integer primary key, at_seconds real not null, words text not null);
"""


class Store:
    """The coordinator's decisions, in the file `path`, which is created if it does not exist.

    Raises:
        sqlite3.DatabaseError: the file exists, and is no such store.
    """

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        # The thread that opens the file may not be the one that uses it, but two threads never use it at a time.
        self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._file.execute("pragma journal_mode = wal")
        self._file.execute("pragma synchronous = full")
        self._file.executescript(_SCHEMA)

    def load(self) -> SavedViews:
        """What was saved last; `SavedViews()` if nothing was saved."""
        row = self._file.execute("select over from decided").fetchone()
        texts = self._file.execute("select said from views order by number").fetchall()
        if row is None:
            return SavedViews()
        return SavedViews(tuple(VIEW.validate_json(text) for (text,) in texts), ViewStatus(row[0]))

    def save(self, saved: SavedViews, decisions: Sequence[Decision], at_seconds: float) -> None:
        """Save views and decisions in one transaction; once this returns, both survive a loss of power.

        Args:
            at_seconds: the time, in seconds since the epoch.

        Raises:
            sqlite3.Error: they could not be written; the file is unchanged.
        """
        numbers = {view.number for view in saved.lineage}
        with self._file:
            self._file.execute("begin")
            self._file.execute("insert or replace into decided values (1, ?)", (saved.status.value,))
            known = {number for (number,) in self._file.execute("select number from views")}
            self._file.executemany("delete from views where number = ?", [(number,) for number in known - numbers])
            new = [
                (view.number, VIEW.dump_json(view, by_alias=True).decode())
                for view in saved.lineage
                if view.number not in known
            ]
            self._file.executemany("insert into views values (?, ?)", new)
            rows = [(at_seconds, describe(each)) for each in decisions]
            self._file.executemany("insert into happened (at_seconds, words) values (?, ?)", rows)

    def run_spec(self) -> str:
        """The run that the workers train, as JSON; empty before it is known."""
        return self._text("select told from ordered")

    def put_run_spec(self, text: str) -> bool:
        """Store the run, unless one is stored already; returns whether the stored one equals `text`.

        Raises:
            sqlite3.Error: the run could not be written; the file is unchanged.
        """
        self._file.execute("insert or ignore into ordered values (1, ?)", (text,))
        return self.run_spec() == text

    def traits(self) -> str:
        """What must be equal on all workers of the run, as its first worker sent it; empty until then."""
        return self._text("select traits from shared")

    def put_traits(self, text: str) -> str:
        """Store the traits, unless some are stored already; returns the stored ones.

        Raises:
            sqlite3.Error: the traits could not be written; the file is unchanged.
        """
        self._file.execute("insert or ignore into shared values (1, ?)", (text,))
        return self.traits()

    def decisions(self, last: int = 100) -> list[tuple[float, str]]:
        """The latest decisions as text, each with its time in seconds since the epoch."""
        rows = self._file.execute("select at_seconds, words from happened order by number desc limit ?", (last,))
        return [(float(at), str(text)) for at, text in rows][::-1]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _text(self, query: str) -> str:
        row = self._file.execute(query).fetchone()
        return str(row[0]) if row else ""


def describe(decision: Decision) -> str:
    """The decision as a line for a log."""
    match decision:
        case ViewFormed(view, abandoned):
            start = f"step {view.start.step}" if view.sources else "the last checkpoint"
            lost = f"; later steps of view {', '.join(map(str, abandoned))} are abandoned" if abandoned else ""
            return (
                f"view {view.number}: {len(view.members)} workers ({join_names(view.members)}) start from {start}{lost}"
            )
        case ViewEnded(number, status, reason):
            return f"view {number} {_ENDS[status]}: {reason}" if number else reason


_ENDS = {
    ViewStatus.ACTIVE: "continues",
    ViewStatus.ENDING_AT_BOUNDARY: "ends after the current step",
    ViewStatus.ABORTED: "is aborted",
    ViewStatus.BELOW_MINIMUM: "waits for more workers",
    ViewStatus.FINISHED: "is the last one",
}
