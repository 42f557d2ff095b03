"""How one replica lies over its workers, as a value."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Layout:
    """Every worker holds a whole replica; the other axes have their names but are not built yet.

    Args:
        shard: workers over which parameters, gradients and optimizer state are sharded.
        tensor: workers over which single matrices are split.
        pipeline: workers over which the layers are cut into stages.
        context: workers over which the sequence is split.

    Raises:
        ValueError: an axis below 1, or an axis above 1, which this version cannot do.
    """

    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis.name}={size!r} is not a whole number from 1")
            if size > 1:
                raise ValueError(
                    f"{axis.name}={size} is not built yet: this version trains whole replicas ({axis.name}=1)"
                )


LAYOUTS: dict[str, type] = {"Layout": Layout}
