"""Steps per second of interfaces that take the place of another library's: ours against the other, two workers.

torch's DistributedDataParallel with one import changed, and Horovod's interface, run the loop of `scripts/ddp_loop.py`
against DDP on gloo. Lightning's Trainer and Hugging Face's, with DDP and with ours, run `scripts/framework_loop.py`.
Models, sizes and figures are those of ``python -m benchmarks steps``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.single_run import steps
from benchmarks.single_run.steps import DDP, Case, Way


@dataclass(frozen=True)
class Interface:
    """One that takes the place of another.

    Args:
        name: of its cases, with that of the model.
        question: what is compared, for the claim's text.
        ours, theirs: the two ways.
        mlp, gpt: least ratio of steps/s.
        needs: packages.
    """

    name: str
    question: str
    ours: Way
    theirs: Way
    mlp: float
    gpt: float
    needs: tuple[str, ...] = ()

    def cases(self) -> list[Case]:
        """One for each model."""
        return [
            Case.of(f"{self.name}-{model}", self.question, target, model, 2, self.ours, self.theirs)
            for model, target in (("mlp", self.mlp), ("gpt", self.gpt))
        ]

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


def in_framework(name: str, title: str = "") -> Way:
    """A way of `scripts/framework_loop.py`."""
    return Way(name, "torchrun", title, "framework_loop.py")


INTERFACES = (
    Interface("ddp", "steps/s of DDP's interface against DDP", Way("drop-in", "torchrun"), DDP, 1.5, 1.05),
    Interface("horovod", "steps/s of Horovod's interface against DDP", Way("horovod", "unisono"), DDP, 1.5, 1.05),
    Interface(
        "lightning", "steps/s of Lightning's Trainer, our strategy against DDP", in_framework("lightning-unisono"),
        in_framework("lightning-ddp", "Lightning, DDP on gloo"), 1.0, 1.0, ("lightning",)),
    Interface(
        "trainer", "steps/s of Hugging Face's Trainer, ours against DDP", in_framework("trainer-unisono"),
        in_framework("trainer-ddp", "Trainer, DDP on gloo"), 1.0, 1.0, ("transformers", "accelerate")),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    cases = []
    for interface in INTERFACES:
        if missing := interface.missing():
            print(f"{interface.name}: not measured: it needs {' and '.join(missing)} (pip install {' '.join(missing)})")
        else:
            cases += interface.cases()
    return steps.judge("drop_ins", __doc__, cases, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
