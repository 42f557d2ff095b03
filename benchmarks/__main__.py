"""All benchmarks of one host, one after the other: ``python -m benchmarks [--repeats N] [--json FOLDER]``.

Benchmarks that are run separately: those of `netlab` take an hour or more, those that kill or freeze workers take ten
minutes each, and those of layouts' memory and of unequal workers need root.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from pathlib import Path

import benchmarks

NOT_ONE = {"__main__", "disturbed", "harness", "links", "netlab", "peers", "settings"}
CAMPAIGNS = {
    "failures", "freezes", "layout_memory", "netlab_compressors", "netlab_loss", "netlab_slowed", "recovery",
    "simulate", "unequal",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, help="interleaved repeats (as each benchmark has it)")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write a record per benchmark into FOLDER")
    asked = parser.parse_args()
    failed = []
    for name in sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in NOT_ONE | CAMPAIGNS):
        print(f"\n== {name}", flush=True)
        options = [f"--repeats={asked.repeats}"] if asked.repeats else []
        options += [f"--json={asked.json / name}.json"] if asked.json else []
        if importlib.import_module(f"benchmarks.{name}").main(options):
            failed.append(name)
    print(f"\nclaims that do not hold: {', '.join(failed)}" if failed else "\nall claims hold")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
