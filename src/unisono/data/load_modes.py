"""The ways to fetch samples, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inline:
    """Fetch samples in the training thread, when their micro-batch is needed.

    Best if fetching is faster than a switch of threads.
    """


@dataclass(frozen=True)
class Threads:
    """Fetch samples in a background thread, `ahead` micro-batches before they are needed.

    Refused for datasets that draw random numbers, since torch's generators are shared by the whole process.
    """

    ahead: int = 2

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise ValueError(f"ahead={self.ahead!r} is below 1")


@dataclass(frozen=True)
class Processes:
    """Fetch samples in `count` background processes, each `ahead` micro-batches in advance.

    Best for datasets that compute their samples.
    """

    count: int = 1
    ahead: int = 2

    def __post_init__(self) -> None:
        if self.count < 1 or self.ahead < 1:
            raise ValueError(f"count={self.count!r} and ahead={self.ahead!r} must both be 1 or more")


Load = Inline | Threads | Processes
LOADERS: dict[str, type] = {cls.__name__: cls for cls in (Inline, Threads, Processes)}
