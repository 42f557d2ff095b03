"""The table of the campaign: which model runs under which layout; and the check of one cell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.layout_runs import Refused, Run, run
from unisono.layout import LAYOUTS, Layout
from unisono.notation import parse

SAME = 2e-6
OPTIMIZERS = ("sgd", "adamw")
WHOLES = ("gpt", "cnn")
"""Models that an optimizer which sees tensors whole trains too."""
SYNCS = ("AllReduce()", "LocalSGD(every=4)", "ParameterServer()")
# What is expected: ``=`` as on one worker, ``whole`` as on one worker because nothing is split, else a word of `WORDS`.
TABLE = """
replicas  layout                                 gpt  llama  bert  bart    cnn      lstm    odd  drops
1         Layout(shard=2)                        =    =      =     =       =        =       =    =
1         Layout(shard=4)                        =    =      =     =       =        =       =    =
1         Layout(tensor=2)                       =    =      =     =       whole    =       =    =
1         Layout(tensor=4)                       =    =      =     =       whole    =       =    =
1         Layout(pipeline=2)                     =    =      =     named   =        =       =    =
1         Layout(pipeline=4)                     =    =      =     named   =        short   =    =
1         Layout(context=2)                      =    =      =     passes  picture  passes  =    =
1         Layout(context=4)                      =    =      =     passes  picture  passes  =    =
1         Layout(shard=2, tensor=2)              =    =      =     =       whole    =       =    =
1         Layout(shard=2, pipeline=2)            =    =      =     named   =        =       =    =
1         Layout(tensor=2, pipeline=2)           =    =      =     named   whole    =       =    =
1         Layout(shard=2, context=2)             =    =      =     passes  picture  passes  =    =
1         Layout(tensor=2, context=2)            =    =      =     passes  picture  passes  =    =
1         Layout(pipeline=2, context=2)          =    =      =     passes  picture  passes  =    =
1         Layout(shard=2, tensor=2, pipeline=2)  =    =      =     named   whole    =       =    =
2         Layout(shard=2)                        =    =      =     =       =        =       =    =
2         Layout(tensor=2)                       =    =      =     =       whole    =       =    =
2         Layout(pipeline=2)                     =    =      =     named   =        =       =    =
"""
CORNERS = """
model      shard  shard 4  zero 1  replicate  tensor   shard tensor  pipe   shard pipe  context  shard context  twice
methods    =      =        =       =          =        =             =         =               =        =              =
borrowing  =      =        =       =          =        =             =         =               =        =              =
sharing    =      =        =       =          =        =             =         =               =        =              =
small      =      =        =       =          =        =             =         =               =        =              =
sparse     =      =        =       =          =        =             =         =               =        =              =
deciding   =      =        =       =          numbers  numbers       cut       cut             parts    parts          =
experts    =      =        =       =          numbers  numbers       cut       cut             parts    parts          =
choosy     =      =        =       =          numbers  numbers       cut       cut             parts    parts          =
dropped    =      =        =       =          =        =             cut       cut             =        =              =
ignored    =      =        =       =          =        =             cut       cut             =        =              =
doubting   =      =        =       =          =        =             =         =               =        =              =
gpt2       =      =        =       =          =        =             =         =               =        =              =
pictures   =      =        =       =          whole    whole         cut       cut             picture  picture        =
lengths    =      =        =       =          =        =             =         =               =        =              =
padded     =      =        =       =          =        =             =         =               =        =              =
long       -      -        -       -          -        -             -         -               window   window         -
"""  # ``-``: not tried
COLUMNS = {
    "shard": (1, "Layout(shard=2)"),
    "shard 4": (1, "Layout(shard=4)"),
    "zero 1": (1, "Layout(shard=2, zero=1)"),
    "replicate": (1, "Layout(replicate=2)"),
    "tensor": (1, "Layout(tensor=2)"),
    "shard tensor": (1, "Layout(shard=2, tensor=2)"),
    "pipe": (1, "Layout(pipeline=2)"),
    "shard pipe": (1, "Layout(shard=2, pipeline=2)"),
    "context": (1, "Layout(context=2)"),
    "shard context": (1, "Layout(shard=2, context=2)"),
    "twice": (2, "Layout(shard=2)"),
}
WORDS = {
    "numbers": "on the meta device, where possible splits are found, its code fails",
    "cut": "no cut point was found",
    "parts": "on parts of a sequence",
    "window": "the model has a table of 16 positions",
    "short": "the model has 3 units, so 1 to 3 stages",
    "picture": "pad or cut sequences",
    "passes": "on parts of a sequence: the output differs",
    "named": "the stages of BartForConditionalGeneration do not run",
    "slices": "a server keeps slices of parameters",
}


@dataclass(frozen=True)
class Cell:
    """One model under one layout, in so many replicas."""

    model: str
    optimizer: str
    layout: str
    replicas: int = 1
    sync: str = "AllReduce()"

    def __str__(self) -> str:
        several = f" x{self.replicas} {self.sync}" if self.replicas > 1 else ""
        return f"{self.model} {self.optimizer} {self.layout}{several}"

    @property
    def value(self) -> Layout:
        """The layout."""
        found = parse("layout", self.layout, LAYOUTS)
        assert isinstance(found, Layout)
        return found

    @property
    def workers(self) -> int:
        """Of the run."""
        return self.replicas * self.value.workers

    @property
    def settings(self) -> dict[str, Any]:
        """Of the run, and of the one that it is compared with. Clipping hides gradients of a wrong size, so SGD goes
        without it; servers of parts cannot do it."""
        clip = 1.0 if self.optimizer == "adamw" and self.sync != "ParameterServer()" else None
        return {"sync": self.sync, "clip": clip}

    @property
    def reference(self) -> Cell:
        """One worker on the same micro-batches; of replicas that are not always alike, as many whole ones."""
        apart = self.sync.startswith("LocalSGD")
        return Cell(self.model, self.optimizer, "Layout()", self.replicas if apart else 1, self.sync)

    def train(self, path: Path, steps: int) -> Run:
        """The run itself, in `path`."""
        settings = {**self.settings, "layout": self.layout, "steps": steps}
        return run(self.model, {"optimizer": self.optimizer}, self.workers, path, **settings)


def expected() -> dict[Cell, str]:
    """What is expected of each cell."""
    header, *rows = _words(TABLE)
    found = _corners()
    for replicas, layout, *words in rows:
        for model, word in zip(header[2:], words, strict=True):
            for sync in SYNCS if int(replicas) > 1 else SYNCS[:1]:
                for optimizer in OPTIMIZERS:
                    found[Cell(model, optimizer, layout, int(replicas), sync)] = word
                if model in WHOLES:
                    servers = sync.startswith("ParameterServer")
                    found[Cell(model, "adafactor", layout, int(replicas), sync)] = "slices" if servers else word
    return found


def _corners() -> dict[Cell, str]:
    header, *rows = _words(CORNERS)
    return {
        Cell(model, optimizer, layout, replicas): word
        for model, *words in rows
        for (replicas, layout), word in zip(map(COLUMNS.__getitem__, header[1:]), words, strict=True)
        for optimizer in OPTIMIZERS
        if word != "-"
    }


def _words(table: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in table.strip().splitlines()]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: by how much the losses of its steps differ at most, or why it was refused."""

    cell: Cell
    differs: float = 0.0
    steps: int = 0
    refused: str = ""
    whole: bool = False

    def is_what(self, word: str) -> bool:
        """Whether the table says so."""
        if self.refused:
            return word in WORDS and WORDS[word] in self.refused
        return self.differs <= SAME and word == ("whole" if self.whole else "=")

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        return f"{self.differs:.1e} over {self.steps} steps" + (", the model stays whole" if self.whole else "")


@dataclass
class Bench:
    """Tries cells in directory `path`, so many steps each; what they are compared with is run once."""

    path: Path
    steps: int = 20
    _references: dict[Cell, Run] = field(default_factory=dict)
    _runs: int = 0

    def outcome(self, cell: Cell) -> Outcome:
        """Of `cell`."""
        try:
            found = self._train(cell)
        except Refused as refusal:
            return Outcome(cell, refused=str(refusal))
        expected = self.reference(cell.reference)
        assert found.losses.keys() == expected.losses.keys() == set(range(1, self.steps + 1))
        differs = max(abs(found.losses[step] - loss) for step, loss in expected.losses.items())
        return Outcome(cell, differs, self.steps, whole="tensor axis: nothing" in found.log)

    def reference(self, cell: Cell) -> Run:
        """The run of `cell`, kept."""
        if cell not in self._references:
            self._references[cell] = self._train(cell)
        return self._references[cell]

    def _train(self, cell: Cell) -> Run:
        self._runs += 1
        return cell.train(self.path / f"run{self._runs}", self.steps)
