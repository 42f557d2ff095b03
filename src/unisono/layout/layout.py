"""How one replica lies over its workers, as a value."""

from __future__ import annotations

from dataclasses import dataclass, fields

AXES = ("pipeline", "shard", "context", "tensor")  # from the outermost to the innermost: neighbours talk most


@dataclass(frozen=True)
class Layout:
    """One replica on ``shard * tensor * pipeline * context`` workers; what is left over of a run's workers are further
    replicas, which agree by the synchronizer.

    Args:
        shard: workers over which parameters, gradients and optimizer state are sharded; each computes micro-batches of
            its own (torch's `fully_shard`; Rajbhandari et al. 2020, "ZeRO", stage 3).
        tensor: workers over which single matrices are split, attention by heads (Shoeybi et al. 2019, "Megatron-LM").
            What can be split is found by the model's structure and tried out; the rest stays whole on each, and the
            log says why.
        context: workers over which sequences are split, in chunks of a balanced order; keys and values are gathered
            for attention (Liu et al. 2023, "Ring attention"; the order is that of Llama 3's training). Parameters are
            sharded over them too.

    Attributes:
        pipeline: workers over which layers are split: not built yet.

    Raises:
        ValueError: an axis below 1, or one above 1 that this version cannot do.
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
            if size > 1 and axis.name not in _BUILT:
                raise ValueError(f"{axis.name}={size} is not built yet: this version has shard, tensor and context")

    def __str__(self) -> str:
        said = [f"{each.name}={getattr(self, each.name)}" for each in fields(self)
                if getattr(self, each.name) != each.default]  # fmt: skip
        return f"Layout({', '.join(said)})"

    @property
    def workers(self) -> int:
        """How many hold one replica."""
        return self.shard * self.tensor * self.pipeline * self.context


_BUILT = ("shard", "tensor", "context")
LAYOUTS: dict[str, type] = {"Layout": Layout}
