"""Which task or script a host agrees to run when it joins a run: the one that was named on this host."""

from __future__ import annotations

import importlib.machinery
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from unisono.errors import InvalidInput, printable
from unisono.membership.messages import RunSpecMessage
from unisono.tasks import TASKS
from unisono.tasks.source import NamedTask


@dataclass(frozen=True)
class Consent:
    """What this host agrees to run. Without it, a holder of the token could run any function on every host that joins.

    A task is built in, or lies below `directory` and not among installed packages; nothing is imported before that is
    known. Otherwise any module of the interpreter could be named as one.

    Args:
        task: the name of a task, as `NamedTask` has it.
        script: the path of a script.
        own: the run was started by this user on this host, so that its order is trusted.
        asks: called with the run's task or script in words, where neither is named; returns whether to run it. None:
            there is no terminal.
        directory: what paths are relative to, and where tasks lie that are not built in, nor in the file of `task`.
    """

    task: str = ""
    script: str = ""
    own: bool = False
    asks: Callable[[str], bool] | None = None
    directory: str = field(default_factory=os.getcwd)

    def check(self, order: RunSpecMessage) -> None:
        """Raise `InvalidInput` if `order` names another task or script. Nothing is imported."""
        if self.own:
            return
        what = words(order)
        if order.task:
            self._check_place(NamedTask(order.task, directory=self.directory))
        if self.task or self.script:
            if not (self._names_script(order) if order.script else self._names_task(order)):
                name, said = ("--task", self.task) if self.task else ("--script", self.script)
                raise InvalidInput(name, said, f"the run is another one: {what}", "name the run's own task or script")
        elif self.asks is None:
            cure = "--script FILE" if order.script else "--task NAME"
            raise InvalidInput("coordinator", what, "this host has not agreed to run it", f"add {cure}")
        elif not self.asks(what):
            raise InvalidInput("coordinator", what, "refused on the terminal", "join another run")

    def check_function(self, source: NamedTask) -> None:
        """Raise `InvalidInput` if the function of `source` is defined outside the allowed directories: a module may
        import a function from elsewhere. Imports the module."""
        if self.own or source.name in TASKS:
            return
        target = inspect.unwrap(source.target())
        file = inspect.getsourcefile(target) if inspect.isroutine(target) or inspect.isclass(target) else None
        if callable(target) and not (file and self._below(Path(file))):
            raise self._elsewhere(source)

    def _names_task(self, order: RunSpecMessage) -> bool:
        return bool(self.task) and NamedTask(self.task, directory=self.directory).absolute() == order.task

    def _names_script(self, order: RunSpecMessage) -> bool:
        here = Path(self.directory, Path(self.script).expanduser())
        return bool(self.script) and here.resolve() == Path(order.script[0]).resolve()

    def _check_place(self, source: NamedTask) -> None:
        if source.name in TASKS:
            return
        place, _ = source.place()
        if place.endswith(".py"):
            found: Path | None = Path(place)
        else:
            path = [self.directory, *sys.path]
            spec = importlib.machinery.PathFinder.find_spec(place.partition(".")[0], path)
            locations = [] if spec is None else list(spec.submodule_search_locations or filter(None, [spec.origin]))
            found = Path(locations[0]) if len(locations) == 1 else None
        if found is None or not self._below(found):
            raise self._elsewhere(source)

    def _below(self, path: Path) -> bool:
        said = Path(self.directory)
        place, _, _ = self.task.rpartition(":")
        roots = [said, *([Path(said, Path(place).expanduser()).parent] if place.endswith(".py") else [])]
        found = path.resolve()
        installed = any(found.is_relative_to(library) for library in _LIBRARIES)  # often below a project's directory
        return not installed and any(found.is_relative_to(root.resolve()) for root in roots)

    def _elsewhere(self, source: NamedTask) -> InvalidInput:
        return InvalidInput(
            "task", source.name, f"it is not built in, and does not lie below {self.directory}",
            "name its directory by --directory DIR")  # fmt: skip


_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = [Path(each).resolve() for each in (*_INSTALLED, site.getusersitepackages())]


def words(order: RunSpecMessage) -> str:
    """The run's task with its arguments, or its script, for a person."""
    if order.script:
        return printable(" ".join(["script", *order.script]))
    given = "".join(f" {name}={value!r}" for name, value in order.arguments.items())
    return printable(f"task {order.task}{given}")
