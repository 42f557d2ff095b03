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


@dataclass(frozen=True)
class Case:
    """A model on so many workers, and what is claimed of it."""

    name: str
    claim: Claim
    workers: int
    model: str
    batch: int
    warmup: int
    steps: int

    @property
    def peer(self) -> str:
        return "plain loop" if self.workers == 1 else "DDP on gloo"


def _case(model: str, workers: int, target: float) -> Case:
    against = "the plain loop" if workers == 1 else "DDP"
    shape = {"mlp": "MLP of 4 x 256", "gpt": "GPT of 10M parameters"}[model]
    claim = Claim(f"{shape}, {workers} worker{'s' * (workers > 1)}: steps/s against {against}", target)
    size = {"mlp": (32, 200, 1500), "gpt": (4, 3, 12)}[model]
    return Case(f"{model}-{workers}", claim, workers, model, *size)


CASES = (_case("mlp", 2, 2.0), _case("gpt", 2, 1.05), _case("mlp", 1, 0.95), _case("gpt", 1, 0.95))


def command(way: str, case: Case, optimizer: str) -> list[str]:
    """What a user would type to run the loop that way."""
    start = {
        "plain": [str(BIN / "python")],
        "ddp": [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={case.workers}"],
        "unisono": [str(BIN / "unisono"), "launch", f"--workers={case.workers}"],
    }[way]
    sizes = [f"--batch={case.batch}", f"--warmup={case.warmup}", f"--steps={case.steps}"]
    return [*start, str(SCRIPTS / "ddp_loop.py"), way, f"--model={case.model}", f"--optimizer={optimizer}", *sizes]


def measure(case: Case, optimizer: str, repeats: int) -> Verdict:
    """Both ways, interleaved.

    Raises:
        SystemExit: the two ways did not compute the same.
    """
    ways = ("unisono", "plain" if case.workers == 1 else "ddp")
    print(case.claim.text, end=" ", flush=True)
    ran = harness.interleave(
        {way: functools.partial(harness.run, command(way, case, optimizer)) for way in ways}, repeats
    )
    losses = {way: ran[way][0].report["loss"] for way in ways}
    if abs(losses[ways[0]] - losses[ways[1]]) > 1e-3:
        raise SystemExit(f"{case.name}: the two ways do not compute the same: loss {losses}")
    rates = [[1 / r.report["step_seconds_median"] for r in ran[way]] for way in ways]
    return Verdict(case.claim, case.peer, "steps/s", *rates)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--only", choices=[c.name for c in CASES], help="one case")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    asked = parser.parse_args(arguments)
    cases = [c for c in CASES if asked.only in (None, c.name)]
    verdicts = [harness.print_verdict(measure(case, asked.optimizer, asked.repeats)) for case in cases]
    return harness.conclude("steps", verdicts, asked.json, optimizer=asked.optimizer)


if __name__ == "__main__":
    raise SystemExit(main())
