"""``unisono tasks``: lists the built-in tasks and their options."""

from __future__ import annotations

from unisono.cli.task_help import first_sentence, task_options
from unisono.errors import InvalidInput
from unisono.tasks import TASKS


def tasks(words: list[str]) -> int:
    """Print every built-in task with its options.

    Raises:
        InvalidInput: there are arguments.
    """
    if words in (["--help"], ["-h"]):
        print("usage: unisono tasks\n\nList the built-in tasks and their options.")
        return 0
    if words:
        raise InvalidInput("tasks", " ".join(words), "it takes no arguments", "write unisono tasks")
    for name in TASKS:
        print(f"{name}: {first_sentence(name)}")
        print("\n".join(task_options(name).splitlines()[1:]), end="\n\n")
    return 0
