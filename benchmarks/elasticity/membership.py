"""Cost of elasticity without faults: steps per second with `elastic` on and off.

With it: coordinator, agents with their threads, and the time ledger. Without it: neither coordinator nor agent.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import setting_comparison
from benchmarks.setting_comparison import SIZES

KEPT = 0.99


def main(arguments: Sequence[str] | None = None) -> int:
    return setting_comparison.compare(
        "membership", __doc__, 9, "steps/s that may come and go against those that may not",
        ("elastic on", "--elastic=on"), ("elastic off", "--elastic=off"), dict.fromkeys(SIZES, KEPT),
        arguments)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
