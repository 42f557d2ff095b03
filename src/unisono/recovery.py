"""Training goes on when workers die, freeze, join and leave."""

from __future__ import annotations

from unisono.config import Config
from unisono.sync import AllReduce


def recovers(config: Config) -> bool:
    """Whether workers of such a run may come and go."""
    return isinstance(config.sync, AllReduce) and config.layout.workers == 1
