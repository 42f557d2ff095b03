"""Runs one benchmark, or all that need neither root nor much time.

    python -m benchmarks [--repeats N] [--json FOLDER]
    python -m benchmarks NAME [its options]

Run by name only: benchmarks on slow networks (an hour or more), those that kill or freeze workers (ten minutes each),
that of drop-in interfaces (twenty minutes), and those of a layout's memory and of unequal workers, which need root.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import FOLDERS

LIBRARIES = {"killed_training"}
BY_NAME_ONLY = {
    "compressors", "drop_ins", "failures", "freezes", "layout_memory", "links", "recovery", "simulate",
    "straggler", "time_to_loss", "unequal",
}  # fmt: skip


def modules() -> dict[str, str]:
    """The module of each benchmark by its name."""
    found = {
        module.name: f"benchmarks.{folder}.{module.name}"
        for folder in FOLDERS
        for module in pkgutil.iter_modules([str(Path(__file__).parent / folder)])
    }
    return {name: found[name] for name in sorted(found) if name not in LIBRARIES}


def run(name: str, options: Sequence[str]) -> int:
    """The exit code of one benchmark: 1 if one of its claims does not hold."""
    code: int = importlib.import_module(modules()[name]).main(options) or 0
    return code


def main(arguments: Sequence[str]) -> int:
    """Run what `arguments` ask for; the exit code."""
    names = modules()
    if arguments and not arguments[0].startswith("-"):
        if arguments[0] not in names:
            print(f"{arguments[0]}: no benchmark; there are {', '.join(names)}", file=sys.stderr)
            return 2
        sys.argv[0] = f"python -m benchmarks {arguments[0]}"  # for --help
        return run(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help="interleaved repeats (as each benchmark has it)")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write a record per benchmark into FOLDER")
    asked = parser.parse_args(arguments)
    failed = []
    for name in [name for name in names if name not in BY_NAME_ONLY]:
        print(f"\n== {name}", flush=True)
        options = [f"--repeats={asked.repeats}"] if asked.repeats else []
        options += [f"--json={asked.json / name}.json"] if asked.json else []
        if run(name, options):
            failed.append(name)
    print(f"\nclaims that do not hold: {', '.join(failed)}" if failed else "\nall claims hold")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
