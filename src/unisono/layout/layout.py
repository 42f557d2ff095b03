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
)  # outermost first: ranks that differ only on the last axes are neighbours, and communicate most
DATA_AXES = ("replicate", "shard", "expert")  # axes whose ranks compute different micro-batches
SHARDING_AXES = ("shard", "expert", "context", "tensor")  # axes over whose ranks single parameters are sharded
SCHEDULES = {  # the number of stages per worker
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How one replica is divided among its workers, whose number is the product of the axes.

    The remaining workers of a run form further replicas, which agree by the synchronizer.

    Args:
        shard: the number of workers over which parameters, gradients and optimizer state are sharded. Each worker
            computes its own micro-batches (torch's `fully_shard`; Rajbhandari et al. 2020, "ZeRO", stage 3).
        tensor: the number of workers over which single matrices are split, attention by heads (Shoeybi et al. 2019,
            "Megatron-LM"). Candidates come from the model's own plan (transformers) or from its structure, and each is
            verified. All else stays whole on every worker, and the log gives the reason.
        context: the number of workers over which sequences are split, into chunks that give them equal work. Keys and
            values are gathered for attention (Liu et al. 2023, "Ring attention"; chunks are ordered as in the training
            of Llama 3). Parameters are sharded over these workers too.
        expert: the number of workers over which the experts of a mixture are split; each worker has whole experts.
            Tokens of all these workers' micro-batches are sent to the experts that they chose (Lepikhin et al. 2020,
            "GShard"). All else is sharded over these workers too.
        replicate: the number of copies of all this within one replica (hybrid sharding). Their gradients are summed in
            every step, with any synchronizer.
        zero: what is sharded, by the stages of ZeRO. 3: parameters, gradients and optimizer state, which needs the
            least memory. 2: parameters stay unsharded from forward to backward, which needs memory for all of them and
            half the gathers. 1: parameters stay unsharded between micro-batches too, and gradients until the last
            micro-batch of a step. This needs memory for both, and one gather and one sum per step. A pipeline sums
            gradients once per step in any case.
        offload: whether parameters, gradients and optimizer state are in host memory, and parameters are copied to the
            device block by block. This saves device memory and costs transfer time. No effect where the device is a
            CPU.
        pipeline: the number of workers over which layers are split, in stages of equal time. Worker 0 measures each
            kind of block on a micro-batch. The cuts minimize the time of the busiest worker; among cuts within 2
            percent, they minimize the memory of the heaviest worker.
        schedule: the order of a pipeline's forward and backward passes in a step: ``GPipe`` (Huang et al. 2019),
            ``1F1B`` (Narayanan et al. 2019), ``Interleaved1F1B``, ``LoopedBFS``, ``InterleavedZeroBubble``,
            ``ZBVZeroBubble`` (Qi et al. 2023), ``DualPipeV`` (DeepSeek-AI 2024).
        cuts: the modules at which all stages but the first begin. Empty: stages are balanced by measured time, or by
            bytes of parameters where the model cannot be measured.
        plan: for modules, by name or pattern (``blocks.*.up``), the style in which ``tensor`` splits each. ``column``:
            each worker computes its part of the outputs. ``row``: each worker has its part of the inputs, computed by a
            column layer before, and the results are summed. ``vocabulary``: an embedding is split by rows.
            ``column gathered``: every worker gets all outputs. ``row scattered``: every worker has all inputs, and
            takes its part. ``column of thirds``: queries, keys and values are in one matrix. ``column of halves``: gate
            and up are in one matrix. Modules without an entry stay whole. Empty: a plan is derived.

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
            raise ValueError(
                f"cuts={self.cuts!r} makes {len(self.cuts) + 1} stages, "
                f"but pipeline={self.pipeline} with schedule={self.schedule!r} has {self.stages}"
            )
        self._check_plan()
        object.__setattr__(self, "plan", StyleMapping(self.plan))

    def _check_plan(self) -> None:
        if not isinstance(self.plan, Mapping) or not all(isinstance(name, str) for name in self.plan):
            raise ValueError(f"plan={self.plan!r} is not a mapping of module names to styles")
        for name, word in self.plan.items():
            if word not in STYLES:
                raise ValueError(f"plan: {name!r}: {word!r} is not one of {', '.join(STYLES)}")
        if self.plan and self.tensor == 1:
            raise ValueError("plan: it splits matrices over tensor workers, but tensor=1; write tensor=2, or omit it")

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
