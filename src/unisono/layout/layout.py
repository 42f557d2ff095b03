"""How one replica lies over its workers, as a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from unisono.layout.split_styles import STYLES, StyleMapping

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")  # outermost first: neighbours talk most
DATA_AXES = ("replicate", "shard", "expert")  # axes whose members compute micro-batches of their own
SHARDING_AXES = ("shard", "expert", "context", "tensor")  # axes over whose members single parameters are cut
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
            What can be split is what the model's own plan says (transformers), or found by its structure, and tried
            out; the rest stays whole on each, and the log says why.
        context: workers over which sequences are split, in chunks of a balanced order; keys and values are gathered
            for attention (Liu et al. 2023, "Ring attention"; the order is that of Llama 3's training). Parameters are
            sharded over them too.
        expert: workers over which the experts of a mixture are split, whole experts each; tokens of all their
            micro-batches come together there (Lepikhin et al. 2020, "GShard"). All else is sharded over them too.
        replicate: copies of all of this inside a replica, whose gradients are summed in every step whatever the
            synchronizer (hybrid sharding).
        zero: what is sharded, as ZeRO counts its stages. 3: parameters, gradients, optimizer state; least memory.
            2: parameters stay gathered from the forward to the backward pass; memory for all of them, half as much to
            gather. 1: and from micro-batch to micro-batch, as gradients stay whole until the step's last one; memory
            for these too, gathered and summed once per step. A pipeline sums once per step in any case.
        offload: parameters, gradients and optimizer state lie in host memory, and parameters come to the device block
            by block; memory of the device for time on the way. Nothing changes where the device is a CPU.
        pipeline: workers over which layers are split, in stages that take as long: worker 0 measures each kind of block
            on a micro-batch, and the busiest worker gets as little to do as can be (of cuts that differ by less than
            2 percent, those whose heaviest worker is lightest).
        schedule: in which order a pipeline's workers go through the micro-batches of a step: ``GPipe`` (Huang et al.
            2019), ``1F1B`` (Narayanan et al. 2019), ``Interleaved1F1B``, ``LoopedBFS``, ``InterleavedZeroBubble``,
            ``ZBVZeroBubble`` (Qi et al. 2023), ``DualPipeV`` (DeepSeek-AI 2024).
        cuts: the modules at which stages begin, but the first; empty: found by measuring, or by bytes of parameters
            where the model cannot be tried.
        plan: modules, by name or pattern (``blocks.*.up``), to how ``tensor`` splits each: ``column`` (each worker
            computes its share of the outputs), ``row`` (its share of the inputs, which a column before it made; the
            parts are summed), ``vocabulary`` (an embedding's rows), ``column gathered`` and ``row scattered`` (with all
            outputs, and all inputs, on every worker), ``column of thirds`` (queries, keys and values in one matrix),
            ``column of halves`` (gate and up in one). What it does not name stays whole. Empty: found.

    Raises:
        ValueError: an axis below 1, an unknown schedule, as many cuts as make another number of stages, or a plan with
            other words or without ``tensor``.
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
            raise ValueError(f"zero={self.zero}: no gradients are summed over workers; write shard=2, or leave it out")
        if self.offload and self.workers == 1:
            raise ValueError("offload=True: that is a way to shard, and here is one worker; write shard=2")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is none of {', '.join(SCHEDULES)}")
        if not isinstance(self.cuts, tuple) or not all(isinstance(cut, str) for cut in self.cuts):
            raise ValueError(f"cuts={self.cuts!r} is no tuple of names")
        if self.cuts and len(self.cuts) != self.stages - 1:
            raise ValueError(f"cuts: {len(self.cuts)} make {len(self.cuts) + 1} stages, and here are {self.stages}")
        self._check_plan()
        object.__setattr__(self, "plan", StyleMapping(self.plan))

    def _check_plan(self) -> None:
        if not isinstance(self.plan, Mapping) or not all(isinstance(name, str) for name in self.plan):
            raise ValueError(f"plan={self.plan!r} is no mapping of names to words")
        for name, word in self.plan.items():
            if word not in STYLES:
                raise ValueError(f"plan: {name!r}: {word!r} is no way to split a matrix, as {', '.join(STYLES)} are")
        if self.plan and self.tensor == 1:
            raise ValueError("plan: it says how matrices are split over tensor workers, and tensor=1")

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
    def gradient_group_size(self) -> int:
        """Over how many of them the gradient of one parameter is summed inside the replica."""
        return self.data_parallel_size * self.context

    @property
    def data_parallel_size(self) -> int:
        """How many of them compute different micro-batches at the same time."""
        return math.prod(getattr(self, axis) for axis in DATA_AXES)


LAYOUTS: dict[str, type] = {"Layout": Layout}
