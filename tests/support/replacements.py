"""For scripts that lose a worker in their loop over `world.steps`, and are to go on with its replacement."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.leftovers import within
from unisono import World


def environment() -> dict[str, str]:
    """The environment of such a script, which can then import this module."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def await_replacement(world: World, size: int) -> None:
    """Between two steps: wait until there are `size` workers, or a view with the replacement follows the next step."""
    session = world._group.session
    assert session is not None
    assert within(60, lambda: world.size == size or session.view_end_requested), "no replacement has come"
