"""Tasks by name: a built-in name, ``path/to/file.py:function`` or ``package.module:function``.

A `NamedTask` is a plain value that is sent to every worker as JSON or pickle; each worker loads the task from it. Its
arguments may be text from a command line, which the function's annotations convert.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unisono.errors import InvalidInput, UnisonoError
from unisono.notation import nearest
from unisono.tasks import TASKS
from unisono.tasks.arguments import Parameter, bind_arguments, option, parameters

if TYPE_CHECKING:
    from unisono.tasks.task import Task


@dataclass(frozen=True)
class NamedTask:
    """The name of a task, and the arguments of the function that makes it.

    Args:
        name: a built-in name, ``path/to/file.py:function`` or ``package.module:function``.
        arguments: keyword arguments; text is converted by the annotations, dotted names are fields of dataclasses.
        directory: the base of a relative path in `name`.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    directory: str = field(default_factory=os.getcwd)

    def load(self, others: Collection[str] = ()) -> Task:
        """Import and make the task. For `others` see `bind_arguments`.

        Raises:
            InvalidInput: there is no such task, file or function, an argument is unknown, or the function raised an
                exception.
        """
        target = self.target()
        made = (
            target(**bind_arguments(target, self.arguments, others))
            if _built_in(target)
            else self._call(target, others)
        )
        from unisono.tasks.task import Task  # imports torch

        if not isinstance(made, Task):
            problem = f"it returned {_a(type(made).__name__)}, not a Task"
            raise InvalidInput("task", self.name, problem, "end the function with return unisono.Task(…)")
        return made

    def parameters(self) -> dict[str, Parameter]:
        """The parameters of the task by name; fields of dataclasses have dotted names."""
        target = self.target()
        return parameters(target) if callable(target) else {}

    def place(self) -> tuple[str, str]:
        """The file or module of the task, and the name in it, without an import.

        Raises:
            InvalidInput: there is no such built-in task, or no such file.
        """
        place, _, attribute = TASKS.get(self.name, self.name).rpartition(":")
        if not (place and attribute):
            raise self._unknown()
        if place.endswith(".py") and not self._path(place).is_file():
            raise InvalidInput("task", self.name, f"there is no file {place}", "check the path")
        return place, attribute

    def target(self) -> Any:
        """Import the function that makes the task, or the task itself.

        Raises:
            InvalidInput: there is no such task, file, module or function, or the import raised an exception.
        """
        place, attribute = self.place()
        module = self._module(place)
        if not hasattr(module, attribute):
            cure = nearest(attribute, _made_here(module)) if _made_here(module) else "define one"
            raise InvalidInput("task", self.name, f"{place} has no function {attribute}", cure)
        return getattr(module, attribute)

    def absolute(self) -> str:
        """`name`, with the path of a file made absolute, so that it is valid in every directory."""
        place, colon, attribute = self.name.rpartition(":")
        return f"{self._path(place)}{colon}{attribute}" if place.endswith(".py") else self.name

    def mapping(self) -> dict[str, Any]:
        """The fields as plain values for JSON; the inverse is ``NamedTask(**mapping)``."""
        return asdict(self)

    def _call(self, target: Any, others: Collection[str]) -> Any:
        if not callable(target):
            if self.arguments:
                argument = next(iter(self.arguments))
                problem = f"{self.name} is a value and takes no arguments"
                raise InvalidInput(option(argument), self.arguments[argument], problem, "leave it out")
            return target
        with _UserErrors(self.name):
            return target(**bind_arguments(target, self.arguments, others))

    def _module(self, place: str) -> ModuleType:
        if place.endswith(".py"):
            with _UserErrors(self.name):
                return _from_file(self._path(place))
        if self.directory not in sys.path:  # as python -m does
            sys.path.insert(0, self.directory)
        with _UserErrors(self.name):
            try:
                return importlib.import_module(place)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                    raise
                cure = "check the name, or write path/to/file.py:function"
                raise InvalidInput("task", self.name, f"there is no module {error.name}", cure) from None

    def _path(self, place: str) -> Path:
        try:
            return Path(self.directory, Path(place).expanduser())
        except RuntimeError as error:  # unknown user in ~name
            raise InvalidInput("task", self.name, str(error), "write the path in full") from None

    def _unknown(self) -> InvalidInput:
        if self.name.rstrip(":").endswith(".py"):
            return InvalidInput("task", self.name, "names no function", f"write {self.name.rstrip(':')}:function")
        forms = "otherwise path/to/file.py:function or package.module:function"
        return InvalidInput("task", self.name, "there is no such task", f"{nearest(self.name, TASKS)}; {forms}")


class _UserErrors:
    """Turns an exception in user code into one sentence with its line; `UnisonoError` is passed on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, UnisonoError):
            cure = "install it, or correct the name" if isinstance(error, ModuleNotFoundError) else "correct it there"
            raise InvalidInput("task", self._name, _where(error), cure) from error


def _where(error: Exception | SystemExit) -> str:
    message = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or '?').name}, line {error.lineno}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not f.filename.startswith(_NOT_USER_CODE)]
    frame = (user_frames or list(frames))[-1]
    code = f" ({frame.line})" if frame.line else ""
    return f"{Path(frame.filename).name}, line {frame.lineno}{code}: {message}"


_NOT_USER_CODE = (
    "<frozen",
    str(Path(__file__).parents[1]),
    *(sysconfig.get_paths()[p] for p in ("stdlib", "purelib", "platlib")),
)


def _from_file(path: Path) -> ModuleType:
    """Import the file as a module, under its own name if that is free, so that pickle finds its classes."""
    directory = str(path.parent)
    if directory not in sys.path:  # as python script.py does
        sys.path.insert(0, directory)
    spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    if spec is not None and spec.origin is not None and Path(spec.origin).exists() and path.samefile(spec.origin):
        return importlib.import_module(path.stem)
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None  # the name ends in .py
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _made_here(module: ModuleType) -> list[str]:
    functions = inspect.getmembers(module, inspect.isfunction)
    return [name for name, made in functions if made.__module__ == module.__name__ and not name.startswith("_")]


def _built_in(target: Callable[..., Any]) -> bool:
    return getattr(target, "__module__", "").startswith("unisono.tasks.builtin.")


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1] in "aeiouAEIOU" else f"a {noun}"
