"""Cost of equal bits on any number of workers: steps per second with ``Exact()`` against ``Cast()``, two workers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import setting_comparison


def main(arguments: Sequence[str] | None = None) -> int:
    return setting_comparison.compare(
        "exact", __doc__, 5, "steps/s with Exact() against those with Cast()", ("Exact()", "--compress=Exact()"),
        ("Cast()", "--compress=Cast()"), {"mlp": 0.85, "gpt": 0.9}, arguments)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
