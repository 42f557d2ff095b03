"""What it costs, without any fault, that workers may come and go: steps per second with `elastic` on and off.

The whole of ``unisono.train`` on two workers (`peers/whole.py`): coordinator, agents, their threads, and the account of
where time goes on the one side; none of a coordinator and an agent on the other. All steps count, not the median one:
a thread that wakes up now and then costs few steps much.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import BIN, PEERS, Claim, Verdict

KEPT = 0.99
SIZES = {
    "mlp": ("MLP of 4 x 256", 32, 8000),
    "gpt": ("GPT of 10M parameters", 4, 100),
}


def measure(model: str, repeats: int, share: float) -> Verdict:
    """Both ways, interleaved; `share` of the usual number of steps."""
    shape, batch, steps = SIZES[model]
    claim = Claim(f"{shape}, 2 workers: steps/s that may come and go against those that may not", KEPT)
    print(claim.text, end=" ", flush=True)
    script = [str(BIN / "python"), str(PEERS / "whole.py"), "unisono", f"--model={model}", f"--batch={batch}",
              f"--steps={max(2, round(share * steps))}", "--workers=2"]  # fmt: skip
    ways = {way: functools.partial(harness.run, [*script, f"--elastic={way}"]) for way in ("on", "off")}
    ran = harness.interleave(ways, repeats)
    rates = [[each.report["steps_per_second"] for each in ran[way]] for way in ways]
    return Verdict(claim, "elastic off", "steps/s", *rates)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=9)
    parser.add_argument("--only", choices=list(SIZES), help="one model")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of steps")
    asked = parser.parse_args(arguments)
    verdicts = [
        harness.told(measure(model, asked.repeats, asked.share)) for model in SIZES if asked.only in (None, model)
    ]
    return harness.conclude("membership", verdicts, asked.json, share=asked.share)


if __name__ == "__main__":
    raise SystemExit(main())
