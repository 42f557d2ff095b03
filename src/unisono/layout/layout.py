"""How one replica lies over its workers, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")  # outermost first: neighbours talk most
SIDE_BY_SIDE = ("replicate", "shard", "expert")  # axes whose members compute micro-batches of their own
SCHEDULES = {  # stages of each worker
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One replica on as many workers as the product of its axes; what is left over of a run's workers are further
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
        expert: workers over which the experts of a mixture are split, whole experts each; tokens of all their
            micro-batches come together there (Lepikhin et al. 2020, "GShard"). All else is sharded over them too.
        replicate: copies of all of this inside a replica, whose gradients are summed in every step whatever the
            synchronizer (hybrid sharding).
        pipeline: workers over which layers are split, in stages of as many bytes of parameters each.
        schedule: in which order a pipeline's workers go through the micro-batches of a step: ``GPipe`` (Huang et al.
            2019), ``1F1B`` (Narayanan et al. 2019), ``Interleaved1F1B``, ``LoopedBFS``, ``InterleavedZeroBubble``,
            ``ZBVZeroBubble`` (Qi et al. 2023), ``DualPipeV`` (DeepSeek-AI 2024).
        cuts: the modules at which stages begin, but the first; empty: found.

    Raises:
        ValueError: an axis below 1, an unknown schedule, or as many cuts as make another number of stages.
    """

    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    replicate: int = 1
    schedule: str = "1F1B"
    cuts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis}={size!r} is not a whole number from 1")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is none of {', '.join(SCHEDULES)}")
        if not isinstance(self.cuts, tuple) or not all(isinstance(cut, str) for cut in self.cuts):
            raise ValueError(f"cuts={self.cuts!r} is no tuple of names")
        if self.cuts and len(self.cuts) != self.stages - 1:
            raise ValueError(f"cuts: {len(self.cuts)} make {len(self.cuts) + 1} stages, and here are {self.stages}")

    def __str__(self) -> str:
        said = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self)
                if getattr(self, each.name) != each.default]  # fmt: skip
        return f"Layout({', '.join(said)})"

    @property
    def stages(self) -> int:
        """Of a pipeline."""
        return self.pipeline * SCHEDULES[self.schedule]

    @property
    def workers(self) -> int:
        """How many hold one replica."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def side_by_side(self) -> int:
        """How many of them compute different micro-batches at the same time."""
        return math.prod(getattr(self, axis) for axis in SIDE_BY_SIDE)


LAYOUTS: dict[str, type] = {"Layout": Layout}
