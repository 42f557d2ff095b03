"""What it costs, without any fault, that workers may come and go: steps per second with `elastic` on and off.

Coordinator, agents, their threads, and the account of where time goes on the one side; none of a coordinator and an
agent on the other.
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
