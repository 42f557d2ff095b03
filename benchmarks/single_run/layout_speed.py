"""Steps per second of a model on two workers: our layouts against torch's own parallelism in plain loops.

A GPT of 10M parameters runs under ``fully_shard``, ``parallelize_module`` with a hand-written plan, and
``Schedule1F1B`` over two halves written by hand (`scripts/torch_layouts.py`), against `unisono.train` with the
equivalent layout (`scripts/layout_loop.py`). Initial weights, order of samples and fused optimizer are the same; fp32,
one compute thread per worker. If the losses of the last step differ, the benchmark ends with an error.

Then two models with unequal layers, both ours: stages that the library finds against stages of equal numbers of layers.
In the first model, the last two blocks compute most. In the second, convolutions compute most and the linear layers
after them have most parameters; there, equal numbers of layers are as good, and stages of equal bytes would not be.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS, Claim, Verdict

SAME_LOSS = 1e-4
BY_HAND, FOUND = 0.98, 1.15


@dataclass(frozen=True)
class Case:
    """Two ways to lay one model, and what is claimed and expected of the first over the second.

    Args:
        ours, theirs: a layout of ours, or a way of `scripts/torch_layouts.py`.
        sizes: samples of a step, of a micro-batch.
    """

    name: str
    claim: Claim
    expected: str
    model: str
    ours: str
    theirs: str
    peer: str
    sizes: tuple[int, int]


CASES = (
    Case("shard", Claim("GPT of 10M, Layout(shard=2): steps/s", BY_HAND), "0.97 to 1.02: the same parts of torch",
         "gpt", "Layout(shard=2)", "fsdp", "fully_shard by hand", (8, 4)),
    Case("tensor", Claim("GPT of 10M, Layout(tensor=2): steps/s", BY_HAND), "1.0 to 1.3: plain tensors, no DTensors",
         "gpt", "Layout(tensor=2)", "tensor", "parallelize_module by hand", (4, 4)),
    Case("pipeline", Claim("GPT of 10M, Layout(pipeline=2): steps/s", BY_HAND), "0.97 to 1.02: the same schedule",
         "gpt", "Layout(pipeline=2)", "pipeline", "Schedule1F1B by hand", (16, 2)),
    Case("uneven", Claim("blocks of unequal width, stages found: steps/s", FOUND), "1.2 to 1.3 of 9216 / 7168",
         "uneven", "Layout(pipeline=2)", "Layout(pipeline=2, cuts=('4',))", "equal numbers of layers", (512, 64)),
    Case("convolutions", Claim("convolutions, stages found: steps/s", BY_HAND), "1.0: equal numbers are as good here",
         "convolutions", "Layout(pipeline=2)", "Layout(pipeline=2, cuts=('4',))", "equal numbers of layers", (32, 4)),
)  # fmt: skip


def command(case: Case, way: str, steps: int, model: str = "") -> list[str]:
    """What a user would type to run the model that way."""
    sizes = [f"--global-batch={case.sizes[0]}", f"--micro-batch={case.sizes[1]}", f"--steps={steps}"]
    options = [
        str(SCRIPTS / "layout_loop.py"),
        "unisono" if "(" in way else way,
        f"--model={model or case.model}",
        *sizes,
    ]
    if "(" in way:
        return [str(BIN / "python"), *options, f"--layout={way}"]
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", *options]


def measure(case: Case, steps: int, repeats: int, model: str = "") -> Verdict:
    """Both ways, interleaved.

    Raises:
        SystemExit: the two ways did not compute the same.
    """
    print(f"{case.claim.text} against {case.peer}; expected: {case.expected}", flush=True)
    ways = {
        way: functools.partial(harness.run, command(case, way, steps, model), 600.0) for way in (case.ours, case.theirs)
    }
    ran = harness.interleave(ways, repeats)
    compare(case, {way: [r.report["loss"] for r in runs] for way, runs in ran.items()})
    rates = [[1 / r.report["step_seconds_median"] for r in ran[way]] for way in ways]
    return Verdict(case.claim, case.peer, "steps/s", *rates)


def compare(case: Case, losses: Mapping[str, Sequence[float]]) -> None:
    """Raise SystemExit where a loss differs from the others."""
    found = [loss for each in losses.values() for loss in each]
    if max(found) - min(found) > SAME_LOSS:
        raise SystemExit(f"{case.name}: the ways did not compute the same: {dict(losses)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=7)
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one case")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--short", action="store_true", help="two repeats of 8 steps: whether it runs, no figures")
    asked = parser.parse_args(arguments)
    repeats, steps = (2, 8) if asked.short else (asked.repeats, asked.steps)
    chosen = [case for case in CASES if asked.only in (None, case.name)]
    verdicts = [harness.print_verdict(measure(case, steps, repeats)) for case in chosen]
    return harness.conclude("layout_speed", verdicts, asked.json, steps=steps)


if __name__ == "__main__":
    raise SystemExit(main())
