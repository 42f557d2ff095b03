"""A sample of a dataset's content as a few figures, by which two hosts find out whether they have the same data.

Items are read in a forked process, unless they are tensors in memory: code of the dataset's own may count its reads,
draw from a generator of its own, open files that loading processes must not share, crash or hang.

Floating-point numbers, and pixels of one byte, may differ a little between hosts with other processors or libraries, so
they are compared by two figures with a tolerance. All else is compared to the bit. A dataset whose items are random has
no content to compare.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from xxhash import xxh3_64

from unisono.data.fetch import detect_rng_use, plain_tensors
from unisono.data.fork_setup import set_up_child
from unisono.tensors.batch import parts

MOST_ITEMS = 12  # a dataset that flips coins of its own seldom gives all of so many alike twice
_SECONDS = 2.0  # for reading all of them twice
_MOST_BYTES = 1 << 12  # a pipe takes as much at once
_MOST_NUMBERS = 1 << 20  # of one array that are looked at
_TOLERANCE = 0.02  # of an item's size


@dataclass(frozen=True)
class SampleSummary:
    """What of one sample is compared.

    Args:
        index: of the sample.
        exact: digest of structure, shapes, whole numbers and texts.
        size: root mean square of all real numbers.
        projection: of the real numbers on a fixed direction, on the scale of `size`.
    """

    index: int
    exact: str
    size: float
    projection: float

    def matches(self, other: SampleSummary) -> bool:
        """Whether both are of the same sample, but for rounding."""
        if self.exact != other.exact:
            return False
        tolerance = _TOLERANCE * max(self.size, other.size)
        return abs(self.size - other.size) <= tolerance and abs(self.projection - other.projection) <= tolerance


def encode(items: Sequence[SampleSummary]) -> str:
    """`items` as text."""
    return json.dumps([[item.index, item.exact, item.size, item.projection] for item in items])


def decode(text: str) -> list[SampleSummary]:
    """The items that were `encode`. Raises `ValueError` or `TypeError` if it is no such text."""
    return [
        SampleSummary(int(index), str(exact), float(size), float(at)) for index, exact, size, at in json.loads(text)
    ]


def sample_of(dataset: Any) -> list[SampleSummary]:
    """Some items of `dataset`, the same ones on all hosts; none where reading them takes longer than `_SECONDS` or
    fails, or where items are random."""
    return _items(dataset) if plain_tensors(dataset) else _forked(dataset)


def _items(dataset: Any) -> list[SampleSummary]:
    with suppress(Exception):  # training raises it too, if it reads that item
        return [summarize(index, dataset[index]) for index in indices(len(dataset))]
    return []


def _forked(dataset: Any) -> list[SampleSummary]:
    there, here = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        _live(dataset, here, parent)
    os.close(here)
    with open(there, "rb", buffering=0) as pipe:
        with suppress(ChildProcessError):  # code of the user's may wait for any child process
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what the dataset has started
            os.waitpid(pid, 0)
        os.set_blocking(there, False)
        return decode((pipe.read(_MOST_BYTES) or b"[]").decode())


def _live(dataset: Any, pipe: int, parent: int) -> None:
    """The life of the process. Nothing of the worker's may be finished in it: no buffer, no exit function."""
    try:
        os.setpgid(0, 0)
        set_up_child(parent, "reader")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)  # ends it, whatever it is in
        _be_quiet()
        with detect_rng_use() as drew:
            items = _items(dataset)
            again = _items(dataset)  # which differs where a generator of the dataset's own is drawn from
            if items == again and not drew():
                os.write(pipe, encode(items).encode())
    finally:
        os._exit(0)


def _be_quiet() -> None:
    """What the dataset prints and logs is dropped: it will be printed again when the training reads the item."""
    nothing = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    os.dup2(nothing.fileno(), 1)
    os.dup2(nothing.fileno(), 2)
    sys.stdout = sys.stderr = nothing
    logging.disable()


def indices(length: int) -> list[int]:
    """Up to `MOST_ITEMS` indices below `length`, spread evenly."""
    count = min(length, MOST_ITEMS)
    return [i * length // count for i in range(count)]


def summarize(index: int, value: Any) -> SampleSummary:
    """The figures of sample `index`, which is `value`."""
    exact, reals = xxh3_64(), [np.zeros(1)]
    for piece in _pieces(value):
        if isinstance(piece, np.ndarray) and _approximate(piece):
            exact.update(f"reals {piece.shape}".encode())
            flat = piece.reshape(-1)[:_MOST_NUMBERS].astype(np.float64)
            reals.append(np.nan_to_num(flat, posinf=0.0, neginf=0.0))
        elif isinstance(piece, np.ndarray):
            exact.update(f"wholes {piece.shape}".encode())
            exact.update(piece.reshape(-1)[:_MOST_NUMBERS].astype(np.int64).tobytes())
        else:
            exact.update(repr(piece).encode())
    numbers = np.concatenate(reals)
    size = math.sqrt(float(np.square(numbers).mean()))
    at = float(numbers @ np.cos(np.arange(1, len(numbers) + 1))) / math.sqrt(len(numbers))
    return SampleSummary(index, exact.hexdigest(), size, at)


def _approximate(piece: np.ndarray[Any, Any]) -> bool:
    return bool(piece.dtype.kind == "f" or piece.dtype == np.uint8)


def _pieces(value: Any) -> Iterator[Any]:
    """Arrays, and texts that say what is between them."""
    if isinstance(value, Mapping):
        yield f"keys {sorted(map(str, value))}"
    inside = parts(value)
    if inside:
        yield f"holds {len(inside)}"
        for part in inside:
            yield from _pieces(part)
    elif value is None or isinstance(value, bool | int | str | bytes):
        yield value
    else:
        yield _array(value)


def _array(value: Any) -> Any:
    """`value` as an array of numbers, if it is one; else the name of its type."""
    with suppress(TypeError, ValueError, RuntimeError):
        plain = value.detach().to("cpu") if isinstance(value, Tensor) else value
        if isinstance(plain, Tensor):
            plain = (plain.float() if plain.is_floating_point() else plain).numpy()
        found = np.asarray(plain)
        if found.dtype.kind in "fiub":
            return found
    return type(value).__qualname__
