"""Consent of a host that joins a run: it runs only the task or script to which its user agreed."""

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

    A task must be built in, or its file must be below `directory` or the directory of `task`, outside of installed
    packages. Nothing is imported before this check. Otherwise a run could name any module of the interpreter as its
    task.

    Args:
        task: the name of a task, as `NamedTask` has it.
        script: the path of a script.
        own: whether this user started the run on this host, so that its spec is trusted.
        asks: called with a description of the run's task or script if neither `task` nor `script` is given; returns
            whether to run it. None: there is no terminal.
        directory: the base of relative paths, and the directory of tasks that are not built in.
    """

    task: str = ""
    script: str = ""
    own: bool = False
    asks: Callable[[str], bool] | None = None
    directory: str = field(default_factory=os.getcwd)

    def check(self, spec: RunSpecMessage) -> None:
        """Raise `InvalidInput` if `spec` names another task or script. Nothing is imported."""
        if self.own:
            return
        what = describe(spec)
        if spec.task:
            self._check_place(NamedTask(spec.task, directory=self.directory))
        if self.task or self.script:
            if not (self._names_script(spec) if spec.script else self._names_task(spec)):
                name, value = ("--task", self.task) if self.task else ("--script", self.script)
                problem = f"the run to join has {what} instead"
                raise InvalidInput(name, value, problem, "name the run's own task or script")
        elif self.asks is None:
            cure = "--script FILE" if spec.script else "--task NAME"
            raise InvalidInput("coordinator", what, "this host has not agreed to run it", f"add {cure}")
        elif not self.asks(what):
            raise InvalidInput("coordinator", what, "the user of this host declined to run it", "join another run")

    def check_function(self, source: NamedTask) -> None:
        """Raise `InvalidInput` if the function of `source` is defined outside of the allowed directories.

        Imports the module of `source`, which may have imported the function from another file.
        """
        if self.own or source.name in TASKS:
            return
        target = inspect.unwrap(source.target())
        file = inspect.getsourcefile(target) if inspect.isroutine(target) or inspect.isclass(target) else None
        if callable(target) and not (file and self._below(Path(file))):
            raise self._elsewhere(source)

    def _names_task(self, spec: RunSpecMessage) -> bool:
        return bool(self.task) and NamedTask(self.task, directory=self.directory).absolute() == spec.task

    def _names_script(self, spec: RunSpecMessage) -> bool:
        here = Path(self.directory, Path(self.script).expanduser())
        return bool(self.script) and here.resolve() == Path(spec.script[0]).resolve()

    def _check_place(self, source: NamedTask) -> None:
        if source.name in TASKS:
            return
        place, _ = source.place()
        if place.endswith(".py"):
            file: Path | None = Path(place)
        else:
            path = [self.directory, *sys.path]
            module = importlib.machinery.PathFinder.find_spec(place.partition(".")[0], path)
            places = [] if module is None else list(module.submodule_search_locations or filter(None, [module.origin]))
            file = Path(places[0]) if len(places) == 1 else None
        if file is None or not self._below(file):
            raise self._elsewhere(source)

    def _below(self, path: Path) -> bool:
        """Whether `path` is below an allowed directory, and not among installed packages."""
        directory = Path(self.directory)
        place, _, _ = self.task.rpartition(":")
        roots = [directory, *([Path(directory, Path(place).expanduser()).parent] if place.endswith(".py") else [])]
        path = path.resolve()
        installed = any(path.is_relative_to(library) for library in _LIBRARIES)  # often below a project's directory
        return not installed and any(path.is_relative_to(root.resolve()) for root in roots)

    def _elsewhere(self, source: NamedTask) -> InvalidInput:
        return InvalidInput(
            "task", source.name, f"it is not built in, and is not below {self.directory}",
            "name its directory by --directory DIR")  # fmt: skip


_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = [Path(each).resolve() for each in (*_INSTALLED, site.getusersitepackages())]


def describe(spec: RunSpecMessage) -> str:
    """The run's task with its arguments, or its script, for people."""
    if spec.script:
        return printable(" ".join(["script", *spec.script]))
    given = "".join(f" {name}={value!r}" for name, value in spec.arguments.items())
    return printable(f"task {spec.task}{given}")
