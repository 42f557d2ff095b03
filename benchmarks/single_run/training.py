"""Steps per second of ``unisono.train`` on one worker, against a plain loop over a `DataLoader`.

Both have the same task (`scripts/full_training.py`); fp32, one compute thread. Fetching, records and checks count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS, Claim, Verdict

TARGET = 0.95
SIZES = {
    "mlp": ("MLP of 4 x 256", ("--batch=32", "--steps=2000")),
    "gpt": ("GPT of 10M parameters", ("--batch=4", "--steps=16")),
}


def measure(model: str, repeats: int) -> Verdict:
    """Both ways, interleaved."""
    shape, sizes = SIZES[model]
    claim = Claim(f"{shape}, 1 worker: steps/s of unisono.train against a plain loop", TARGET)
    print(claim.text, end=" ", flush=True)
    script = [str(BIN / "python"), str(SCRIPTS / "full_training.py")]
    ways = {
        way: functools.partial(harness.run, [*script, way, f"--model={model}", *sizes]) for way in ("unisono", "plain")
    }
    ran = harness.interleave(ways, repeats)
    rates = [[1 / r.report["step_seconds_median"] for r in ran[way]] for way in ways]
    return Verdict(claim, "loop over a DataLoader", "steps/s", *rates)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--only", choices=list(SIZES), help="one model")
    asked = parser.parse_args(arguments)
    verdicts = [harness.print_verdict(measure(model, asked.repeats)) for model in SIZES if asked.only in (None, model)]
    return harness.conclude("training", verdicts, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
