"""The layout of one replica over its workers, as a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from unisono.layout.split_styles import STYLES, StyleMapping

AXES = (
    "pipeline",
    "replicate",
    "shard",
    "expert",
    "context",
    "tensor",
)  # outermost first: neighbouring ranks communicate most
DATA_AXES = ("replicate", "shard", "expert")  # axes whose ranks compute different micro-batches
SHARDING_AXES = ("shard", "expert", "context", "tensor")  # axes over whose ranks single parameters are sharded
SCHEDULES = {  # stages per worker
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One replica on as many workers as the product of its axes. The remaining workers of a run form further replicas,
    which agree by the synchronizer.

    Args:
        shard: workers over which parameters, gradients and optimizer state are sharded. Each computes its own
            micro-batches (torch's `fully_shard`; Rajbhandari et al. 2020, "ZeRO", stage 3).
        tensor: workers over which single matrices are split, attention by heads (Shoeybi et al. 2019, "Megatron-LM").
            Candidates come from the model's own plan (transformers) or from its structure, and each is verified. All
            else stays whole on every worker, and the log gives the reason.
        context: workers over which sequences are split, in chunks of a balanced order. Keys and values are gathered for
            attention (Liu et al. 2023, "Ring attention"; the order is that of Llama 3's training). Parameters are
            sharded over these workers too.
        expert: workers over which the experts of a mixture are split, whole experts each. Tokens of all their
            micro-batches are sent to their experts (Lepikhin et al. 2020, "GShard"). All else is sharded over these
            workers too.
        replicate: copies of all of this within a replica, whose gradients are summed in every step with any
            synchronizer (hybrid sharding).
        zero: what is sharded, as ZeRO counts its stages. 3: parameters, gradients, optimizer state; least memory. 2:
            parameters stay unsharded from forward to backward; memory for all of them, half the gathers. 1: they also
            stay unsharded between micro-batches, and gradients until the last micro-batch of a step; memory for both,
            and one gather and one sum per step. A pipeline sums once per step in any case.
        offload: parameters, gradients and optimizer state are in host memory, and parameters are copied to the device
            block by block. This saves device memory and costs transfer time. No effect where the device is a CPU.
        pipeline: workers over which layers are split, in stages of equal time. Worker 0 measures each kind of block on
            a micro-batch. The cuts minimize the time of the busiest worker; among cuts within 2 percent, they minimize
            the memory of the heaviest worker.
        schedule: the order of a pipeline's forward and backward passes in a step: ``GPipe`` (Huang et al. 2019),
            ``1F1B`` (Narayanan et al. 2019), ``Interleaved1F1B``, ``LoopedBFS``, ``InterleavedZeroBubble``,
            ``ZBVZeroBubble`` (Qi et al. 2023), ``DualPipeV`` (DeepSeek-AI 2024).
        cuts: the modules at which all stages but the first begin. Empty: found by measurement, or by bytes of
            parameters where the model cannot be measured.
        plan: modules, by name or pattern (``blocks.*.up``), to how ``tensor`` splits each: ``column`` (each worker
            computes its part of the outputs), ``row`` (each has its part of the inputs, as a column before it computes;
            the results are summed), ``vocabulary`` (an embedding's rows), ``column gathered`` and ``row scattered``
            (with all outputs, and all inputs, on every worker), ``column of thirds`` (queries, keys and values in one
            matrix), ``column of halves`` (gate and up in one). Modules without an entry stay whole. Empty: found.

    Raises:
        ValueError: an axis below 1, an unknown schedule, a number of cuts that contradicts the number of stages, an
            unknown word in the plan, or a plan without ``tensor``.
    """

    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    replicate: int = 1
    zero: int = 3
    offload: bool = False
    schedule: str = "1F1B"
    cuts: tuple[str, ...] = ()
    plan: Mapping[str, str] = StyleMapping()

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis}={size!r} is not a whole number from 1")
        if self.zero not in (1, 2, 3) or isinstance(self.zero, bool):
            raise ValueError(f"zero={self.zero!r} is none of 1, 2, 3")
        if not isinstance(self.offload, bool):
            raise ValueError(f"offload={self.offload!r} is not True or False")
        if self.zero != 3 and self.gradient_group_size == 1:
            raise ValueError(f"zero={self.zero}: no gradients are summed over workers; write shard=2, or omit it")
        if self.offload and self.workers == 1:
            raise ValueError("offload=True: it needs a sharded model, and this layout has one worker; write shard=2")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is none of {', '.join(SCHEDULES)}")
        if not isinstance(self.cuts, tuple) or not all(isinstance(cut, str) for cut in self.cuts):
            raise ValueError(f"cuts={self.cuts!r} is not a tuple of names")
        if self.cuts and len(self.cuts) != self.stages - 1:
            raise ValueError(f"cuts: {len(self.cuts)} make {len(self.cuts) + 1} stages, not {self.stages}")
        self._check_plan()
        object.__setattr__(self, "plan", StyleMapping(self.plan))

    def _check_plan(self) -> None:
        if not isinstance(self.plan, Mapping) or not all(isinstance(name, str) for name in self.plan):
            raise ValueError(f"plan={self.plan!r} is not a mapping of names to words")
        for name, word in self.plan.items():
            if word not in STYLES:
                raise ValueError(f"plan: {name!r}: {word!r} is not one of {', '.join(STYLES)}")
        if self.plan and self.tensor == 1:
            raise ValueError("plan: it splits matrices over tensor workers, and tensor=1")

    def __str__(self) -> str:
        changed = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self)
                if getattr(self, each.name) != each.default]  # fmt: skip
        return f"Layout({', '.join(changed)})"

    @property
    def stages(self) -> int:
        """The number of stages of a pipeline."""
        return self.pipeline * SCHEDULES[self.schedule]

    @property
    def workers(self) -> int:
        """The number of workers of one replica."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def gradient_group_size(self) -> int:
        """The number of ranks over which a parameter's gradient is summed within the replica."""
        return self.data_parallel_size * self.context

    @property
    def data_parallel_size(self) -> int:
        """The number of different micro-batches that a replica computes at the same time."""
        return math.prod(getattr(self, axis) for axis in DATA_AXES)


LAYOUTS: dict[str, type] = {"Layout": Layout}
