"""Goodput of a run, from its workers' time ledgers, and advice by rules; without I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unisono.observe.activity import Phase

Spent = Mapping[str, float]  # seconds by the phase's name, as in the summary of a run
_SLOW_RATIO = 1.5  # ratio of a worker's compute time to that of the others from which the worker is slow
_MIN_SECONDS = 1.0  # per worker; advice that saves less is not given


@dataclass(frozen=True)
class _Rule:
    """Advice for runs that spend at least `share` of the time after the start in `phases`."""

    phases: tuple[Phase, ...]
    share: float
    advice: str

    def applies(self, ledgers: Sequence[Spent]) -> bool:
        """Whether the share and the time of these phases are large enough."""
        long = _within(ledgers, self.phases) >= _MIN_SECONDS * len(ledgers)
        return long and _share(ledgers, self.phases) >= self.share


_RULES = (
    _Rule((Phase.RECOVERY, Phase.LOST), 0.1, "{share} was spent on recoveries and repeated steps: workers are lost too "
          "often, or steps are long; smaller steps lose less"),
    _Rule((Phase.DATA,), 0.1, "{share} was spent waiting for data: load it with more processes, as in "
          "--load 'Processes(4)', or make the data set's code cheaper"),
    _Rule((Phase.COMMUNICATION,), 0.2, "{share} was spent waiting for others: send less, as with "
          "--compress 'Quantize(8)' or --sync 'LocalSGD(8)', or give each step more to compute (--global-batch)"),
    _Rule((Phase.CHECKPOINT,), 0.1, "{share} was spent on checkpoints: take fewer (--checkpoint-every), or write to a "
          "faster disk"),
    _Rule((Phase.EVALUATION,), 0.3, "{share} was spent on evaluations: evaluate less often (--evaluate-every)"),
)  # fmt: skip


def total_seconds(spent: Spent) -> float:
    """A worker's lifetime in seconds."""
    return sum(spent.values())


def goodput(ledgers: Sequence[Spent]) -> float:
    """The share of committed computation in the time after the start, over all workers."""
    return _share(ledgers, (Phase.COMPUTE,))


def advice(ledgers: Sequence[Spent]) -> str:
    """The most useful advice; empty if no rule applies."""
    slow = _slowest(ledgers)
    if slow:
        return slow
    applying = [rule for rule in _RULES if rule.applies(ledgers)]
    if not applying:
        return ""
    worst = max(applying, key=lambda rule: _share(ledgers, rule.phases) / rule.share)
    return worst.advice.format(share=f"{_share(ledgers, worst.phases):.0%} of the time")


def shares_text(ledgers: Sequence[Spent]) -> str:
    """Shares of the time after the start, from 1 % on, as text: ``81% computing, 12% communication, 7% data``."""
    shares = sorted(((_share(ledgers, (phase,)), phase) for phase in Phase if phase is not Phase.START),
                    key=lambda each: -each[0])  # fmt: skip
    return ", ".join(f"{share:.0%} {phase.value}" for share, phase in shares if share >= 0.01)


def table(ledgers: Sequence[Spent], names: Sequence[str]) -> list[str]:
    """Lines of a table: one per worker, with seconds by phase and their sum."""
    phases = [phase.value for phase in Phase if any(spent.get(phase.value) for spent in ledgers)]
    rows = [["worker", *phases, "together"]]
    rows += [
        [name, *(f"{spent.get(phase, 0.0):.2f}" for phase in phases), f"{total_seconds(spent):.2f}"]
        for name, spent in zip(names, ledgers)
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    pad: Callable[[str, int], str] = lambda text, width: text.rjust(width)
    return ["  ".join([row[0].ljust(widths[0]), *map(pad, row[1:], widths[1:])]) for row in rows]


def time_report(spent: Mapping[str, Spent]) -> list[str]:
    """Lines of text for the ledgers of workers, by name: a table, a line of shares, and advice."""
    if not spent:
        return []
    ledgers = list(spent.values())
    line, tip = shares_text(ledgers), advice(ledgers)
    lines = [*table(ledgers, list(spent)), *([f"after the start: {line}"] if line else [])]
    return [*lines, tip] if tip else lines


def _slowest(ledgers: Sequence[Spent]) -> str:
    """Advice about a worker that computes so much longer than the others that they wait for it."""
    if len(ledgers) < 2 or _share(ledgers, (Phase.COMMUNICATION,)) < 0.1:
        return ""
    computing = [spent.get(Phase.COMPUTE.value, 0.0) + spent.get(Phase.DATA.value, 0.0) for spent in ledgers]
    slowest = max(range(len(ledgers)), key=computing.__getitem__)
    others = statistics.median(computing[:slowest] + computing[slowest + 1 :])
    if others <= 0 or computing[slowest] < _SLOW_RATIO * others:
        return ""
    times, spent = computing[slowest] / others, ledgers[slowest]
    loads = spent.get(Phase.DATA.value, 0.0) > spent.get(Phase.COMPUTE.value, 0.0)
    look = "where its data comes from, and at the data set's code" if loads else "what else its host does"
    return (f"worker {slowest} took {times:.1f} times as long as the others to load and compute as much, and they "
            f"waited for it: look at {look}")  # fmt: skip


def _share(ledgers: Sequence[Spent], phases: Sequence[Phase]) -> float:
    after = sum(total_seconds(spent) - spent.get(Phase.START.value, 0.0) for spent in ledgers)
    return _within(ledgers, phases) / after if after > 0 else 0.0


def _within(ledgers: Sequence[Spent], phases: Sequence[Phase]) -> float:
    return sum(spent.get(phase.value, 0.0) for spent in ledgers for phase in phases)
