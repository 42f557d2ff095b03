"""Runs many seeds of `unisono chaos`: ``python -m tests.campaigns.chaos --virtual 100 --real 20``.

For digits and for text, with all kinds of faults: `--virtual` seeds of each task on virtual workers, and `--real` seeds
of both together on processes of this machine. Faults and outcomes are written to `--to` after each round. The exit code
is 1 if the outcome of a seed differs from that of the run without faults.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import environment

from unisono.cli import main as unisono

HERE = Path(__file__).parents[2]
TASKS = {
    "digits": ["digits", "--hidden", "4", "--micro-batch", "8"],
    "text": ["text", "--text", str(HERE / "src"), "--micro-batch", "4", "--model.layers", "1", "--model.width", "32",
             "--model.heads", "2", "--model.context", "32"],
}  # fmt: skip


def rounds(virtual: int, real: int, steps: int) -> dict[str, list[str]]:
    """The commands, by name."""
    found: dict[str, list[str]] = {}
    for number, (task, words) in enumerate(TASKS.items()):
        count = real // len(TASKS) + (number < real % len(TASKS))
        if virtual:
            found[f"{task}, made up"] = [*words, "--steps", "40", "--virtual", "--seeds", str(virtual)]
        if count:
            found[f"{task}, processes"] = [*words, "--steps", str(steps), "--seeds", str(count)]
    return found


def conduct(words: Sequence[str]) -> Mapping[str, Any]:
    """What came of one command."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory, "found.json")
        unisono(["chaos", *words, "--json", str(found)])
        return in_short(json.loads(found.read_text())["seeds"])


def in_short(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many seeds came to the same, what befell them, and what was wrong about the others."""
    happened = [each for seed in seeds for each in seed["happened"]]
    kinds = Counter(f"{each['kind']} {each['moment']}".strip() for each in happened)
    return {
        "seeds": len(seeds),
        "equal": sum(seed["equal"] for seed in seeds),
        "faults": dict(sorted(kinds.items())),
        "different": [seed for seed in seeds if not seed["equal"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", type=int, default=100)
    parser.add_argument("--real", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1500, help="of a run on processes (1500)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="for instance benchmarks/results/chaos.json")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    for name, words in rounds(asked.virtual, asked.real, asked.steps).items():
        print(f"{name}: unisono chaos {' '.join(words)}", flush=True)
        found[name] = {"command": f"unisono chaos {' '.join(words)}".replace(f"{HERE}/", ""), **conduct(words)}
        if asked.to:
            asked.to.write_text(json.dumps({"environment": environment(), "rounds": found}, indent=1) + "\n")
    for name, came in found.items():
        print(f"{name}: {came['equal']} of {came['seeds']} equal")
    return 0 if all(came["equal"] == came["seeds"] for came in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
