"""Compares ``unisono.train`` on two workers under two values of one setting (`scripts/full_training.py`).

The figure is the mean over all steps, not the median: costs that occur now and then affect few steps, but heavily.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS, Claim, Verdict

SIZES = {
    "mlp": ("MLP of 4 x 256", 32, 8000),
    "gpt": ("GPT of 10M parameters", 4, 100),
}
"""Of a model: its name, samples per worker and step, steps."""


def compare(
    name: str, doc: str | None, repeats: int, question: str, ours: tuple[str, str], theirs: tuple[str, str],
    targets: Mapping[str, float], arguments: Sequence[str] | None,
) -> int:  # fmt: skip
    """Run a benchmark of two settings, interleaved; its exit code.

    Args:
        question: what is compared, for the claim's text.
        ours, theirs: a name, and the option of `scripts/full_training.py`.
        targets: least ratio of steps/s, by model.
    """
    parser = harness.parser(doc, repeats)
    parser.add_argument("--only", choices=list(targets), help="one model")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of steps")
    asked = parser.parse_args(arguments)
    verdicts = []
    for model in targets if asked.only is None else (asked.only,):
        shape, batch, steps = SIZES[model]
        claim = Claim(f"{shape}, 2 workers: {question}", targets[model])
        print(claim.text, end=" ", flush=True)
        script = [str(BIN / "python"), str(SCRIPTS / "full_training.py"), "unisono", f"--model={model}",
                  f"--batch={batch}", f"--steps={max(2, round(asked.share * steps))}", "--workers=2"]  # fmt: skip
        ways = {name: functools.partial(harness.run, [*script, option]) for name, option in (ours, theirs)}
        ran = harness.interleave(ways, asked.repeats)
        rates = [[each.report["steps_per_second"] for each in ran[way]] for way in ways]
        verdicts.append(harness.print_verdict(Verdict(claim, theirs[0], "steps/s", *rates)))
    return harness.conclude(name, verdicts, asked.json, share=asked.share)
