"""What the coordinator has decided, on disk: one SQLite file that only its owner can read."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.membership.coordinator import Ended, Formed, Happened, Saved, named
from unisono.membership.protocol import StateVersion, View, ViewStatus, WorkerAddress

_SCHEMA = """
create table if not exists decided (one integer primary key check (one = 1), over text not null);
create table if not exists views (number integer primary key, said text not null);
create table if not exists ordered (one integer primary key check (one = 1), told text not null);
create table if not exists shared (one integer primary key check (one = 1), traits text not null);
create table if not exists happened (number integer primary key, at_seconds real not null, words text not null);
"""


class Store:
    """Decisions in the file `path`, made if it is not there.

    Raises:
        sqlite3.DatabaseError: the file is no such store.
    """

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        # Made in one thread, and used in another: never in two at a time.
        self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._file.execute("pragma journal_mode = wal")
        self._file.execute("pragma synchronous = full")
        self._file.executescript(_SCHEMA)

    def load(self) -> Saved:
        """What was decided last; at first, that there is no view."""
        row = self._file.execute("select over from decided").fetchone()
        views = self._file.execute("select said from views order by number").fetchall()
        return Saved(tuple(_view(json.loads(said)) for (said,) in views), ViewStatus(row[0])) if row else Saved()

    def save(self, saved: Saved, happened: Sequence[Happened], at_seconds: float) -> None:
        """Once it returns, both outlive this machine's power.

        Args:
            at_seconds: since the epoch.

        Raises:
            sqlite3.Error: they could not be written, and are not.
        """
        numbers = {view.number for view in saved.lineage}
        with self._file:
            self._file.execute("begin")
            self._file.execute("insert or replace into decided values (1, ?)", (saved.over.value,))
            known = {number for (number,) in self._file.execute("select number from views")}
            self._file.executemany("delete from views where number = ?", [(number,) for number in known - numbers])
            new = [(view.number, json.dumps(view, default=vars)) for view in saved.lineage if view.number not in known]
            self._file.executemany("insert into views values (?, ?)", new)
            rows = [(at_seconds, words(each)) for each in happened]
            self._file.executemany("insert into happened (at_seconds, words) values (?, ?)", rows)

    def order(self) -> str:
        """What workers are to do, as it was told; empty before it was."""
        return self._told("select told from ordered")

    def keep_order(self, told: str) -> bool:
        """Whether it is what workers are to do from now on; of two that differ it is the first.

        Raises:
            sqlite3.Error: it could not be written, and is not.
        """
        self._file.execute("insert or ignore into ordered values (1, ?)", (told,))
        return self.order() == told

    def traits(self) -> str:
        """What all workers of the run must have in common, as its first worker told it; empty before it did."""
        return self._told("select traits from shared")

    def keep_traits(self, told: str) -> str:
        """What is kept from now on: of several that are `told`, the first.

        Raises:
            sqlite3.Error: it could not be written, and is not.
        """
        self._file.execute("insert or ignore into shared values (1, ?)", (told,))
        return self.traits()

    def happened(self, last: int = 100) -> list[tuple[float, str]]:
        """The latest decisions in words, each with its time in seconds since the epoch."""
        rows = self._file.execute("select at_seconds, words from happened order by number desc limit ?", (last,))
        return [(float(at), str(said)) for at, said in rows][::-1]

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _told(self, query: str) -> str:
        row = self._file.execute(query).fetchone()
        return str(row[0]) if row else ""


def words(happened: Happened) -> str:
    """For a log."""
    match happened:
        case Formed(view, given_up):
            given = f"from step {view.start.step}" if view.sources else "from what was kept"
            lost = f"; what view {', '.join(map(str, given_up))} did after it is given up" if given_up else ""
            return f"view {view.number}: {len(view.members)} workers ({named(view.members)}) go on {given}{lost}"
        case Ended(number, over, why):
            return f"view {number} ends {over.value}: {why}" if number else why


def _view(told: dict[str, Any]) -> View:
    places = tuple(WorkerAddress(**place) for place in told["places"])
    return View(told["number"], tuple(told["members"]), StateVersion(**told["start"]), tuple(told["sources"]), places)
