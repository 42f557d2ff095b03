"""Steps per second of a custom loop: ours against DDP on gloo, and against the plain loop.

All have the same model, fused optimizer, batches in memory and loop (`scripts/ddp_loop.py`); fp32, one compute thread
per worker. Every figure is one run of the whole group: warm-up steps, then timed ones, of which rank 0 reports the
median.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS, Claim, Verdict

SHAPES = {"mlp": "MLP of 4 x 256", "gpt": "GPT of 10M parameters"}
SIZES = {"mlp": (32, 200, 1500), "gpt": (4, 3, 12)}
"""Of a model: samples per worker and step, warm-up steps, timed steps."""


@dataclass(frozen=True)
class Way:
    """A way of a script, what starts it (``python``, ``torchrun`` or ``unisono``), and its title as a peer."""

    name: str
    launcher: str
    title: str = ""
    script: str = "ddp_loop.py"


PLAIN = Way("plain", "python", "plain loop")
DDP = Way("ddp", "torchrun", "DDP on gloo")
UNISONO = Way("unisono", "unisono")


@dataclass(frozen=True)
class Case:
    """A model on so many workers in two ways, and what is claimed of them."""

    name: str
    claim: Claim
    workers: int
    model: str
    batch: int
    warmup: int
    steps: int
    ours: Way
    theirs: Way

    @staticmethod
    def of(name: str, question: str, target: float, model: str, workers: int, ours: Way, theirs: Way) -> Case:
        """With the sizes of `model`; `question` is what is compared, for the claim's text."""
        claim = Claim(f"{SHAPES[model]}, {workers} worker{'s' * (workers > 1)}: {question}", target)
        return Case(name, claim, workers, model, *SIZES[model], ours, theirs)


CASES = (
    Case.of("mlp-2", "steps/s against DDP", 2.0, "mlp", 2, UNISONO, DDP),
    Case.of("gpt-2", "steps/s against DDP", 1.05, "gpt", 2, UNISONO, DDP),
    Case.of("mlp-1", "steps/s against the plain loop", 0.95, "mlp", 1, UNISONO, PLAIN),
    Case.of("gpt-1", "steps/s against the plain loop", 0.95, "gpt", 1, UNISONO, PLAIN),
)


def command(way: Way, case: Case, optimizer: str) -> list[str]:
    """What a user would type to run the loop that way."""
    start = {
        "python": [str(BIN / "python")],
        "torchrun": [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={case.workers}"],
        "unisono": [str(BIN / "unisono"), "launch", f"--workers={case.workers}"],
    }[way.launcher]
    sizes = [f"--batch={case.batch}", f"--warmup={case.warmup}", f"--steps={case.steps}"]
    return [*start, str(SCRIPTS / way.script), way.name, f"--model={case.model}", f"--optimizer={optimizer}", *sizes]


def measure(case: Case, optimizer: str, repeats: int) -> Verdict:
    """Both ways, interleaved.

    Raises:
        SystemExit: the two ways did not compute the same.
    """
    ways = {way.name: way for way in (case.ours, case.theirs)}
    print(case.claim.text, end=" ", flush=True)
    ran = harness.interleave(
        {name: functools.partial(harness.run, command(way, case, optimizer)) for name, way in ways.items()}, repeats
    )
    losses = {name: found[0].report["loss"] for name, found in ran.items()}
    if abs(losses[case.ours.name] - losses[case.theirs.name]) > 1e-3:
        raise SystemExit(f"{case.name}: the two ways do not compute the same: loss {losses}")
    rates = [[1 / each.report["step_seconds_median"] for each in found] for found in ran.values()]
    return Verdict(case.claim, case.theirs.title, "steps/s", *rates)


def judge(name: str, doc: str | None, cases: Sequence[Case], arguments: Sequence[str] | None) -> int:
    """Run the benchmark `name`, of these `cases` or of one of them; its exit code."""
    parser = harness.parser(doc, repeats=5)
    parser.add_argument("--only", choices=[c.name for c in cases], help="one case")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    asked = parser.parse_args(arguments)
    chosen = [c for c in cases if asked.only in (None, c.name)]
    verdicts = [harness.print_verdict(measure(case, asked.optimizer, asked.repeats)) for case in chosen]
    return harness.conclude(name, verdicts, asked.json, optimizer=asked.optimizer)


def main(arguments: Sequence[str] | None = None) -> int:
    return judge("steps", __doc__, CASES, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
