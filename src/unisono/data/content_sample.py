"""Summaries of some samples of a dataset, by which two hosts check that they have the same data.

Samples are read in a forked process, unless they are tensors in memory. The dataset's code may count reads, draw random
numbers from a generator of its own, open files that loading processes must not share, crash or hang.

Floating-point numbers and 8-bit pixels may differ slightly between hosts with different processors or libraries, so
they are compared by two numbers with a tolerance. Everything else is compared bit by bit. A dataset with random samples
cannot be compared.
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

MOST_ITEMS = 12  # a dataset with a private generator seldom returns so many equal samples twice
_SECONDS = 2.0  # time to read all of them twice
_MOST_BYTES = 1 << 12  # a pipe accepts this many at once
_MOST_NUMBERS = 1 << 20  # so many numbers of an array are read
_TOLERANCE = 0.02  # relative to `SampleSummary.size`


@dataclass(frozen=True)
class SampleSummary:
    """A summary of one sample, by which two hosts compare it.

    Args:
        index: the sample's index.
        exact: a digest of structure, shapes, integers and texts.
        size: the root mean square of all floating-point numbers and 8-bit pixels.
        projection: the projection of these numbers on a fixed direction, on the scale of `size`.
    """

    index: int
    exact: str
    size: float
    projection: float

    def matches(self, other: SampleSummary) -> bool:
        """Whether both summarize the same sample, up to rounding."""
        if self.exact != other.exact:
            return False
        tolerance = _TOLERANCE * max(self.size, other.size)
        return abs(self.size - other.size) <= tolerance and abs(self.projection - other.projection) <= tolerance


def encode(items: Sequence[SampleSummary]) -> str:
    """`items` as JSON."""
    return json.dumps([[item.index, item.exact, item.size, item.projection] for item in items])


def decode(text: str) -> list[SampleSummary]:
    """Inverse of `encode`. Raises `ValueError` or `TypeError` for other texts."""
    return [
        SampleSummary(int(index), str(exact), float(size), float(at)) for index, exact, size, at in json.loads(text)
    ]


def sample_of(dataset: Any) -> list[SampleSummary]:
    """Summaries of some samples of `dataset`, the same ones on all hosts.

    Empty if reading them takes longer than `_SECONDS` or fails, or if they are random.
    """
    return _items(dataset) if plain_tensors(dataset) else _forked(dataset)


def _items(dataset: Any) -> list[SampleSummary]:
    with suppress(Exception):  # training raises the same error if it reads that sample
        return [summarize(index, dataset[index]) for index in indices(len(dataset))]
    return []


def _forked(dataset: Any) -> list[SampleSummary]:
    there, here = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        _run_reader(dataset, here, parent)
    os.close(here)
    with open(there, "rb", buffering=0) as pipe:
        with suppress(ChildProcessError):  # user code may have waited for this child process
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # processes that the dataset has started
            os.waitpid(pid, 0)
        os.set_blocking(there, False)
        return decode((pipe.read(_MOST_BYTES) or b"[]").decode())


def _run_reader(dataset: Any, pipe: int, parent: int) -> None:
    """Body of the forked process. It must run no exit function of the worker, and flush none of its buffers."""
    try:
        os.setpgid(0, 0)
        set_up_child(parent, "reader")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)  # kills the process, even in native code
        _discard_output()
        with detect_rng_use() as rng_used:
            items = _items(dataset)
            again = _items(dataset)  # differs if the dataset draws from a private generator
            if items == again and not rng_used():
                os.write(pipe, encode(items).encode())
    finally:
        os._exit(0)


def _discard_output() -> None:
    """Discard what the dataset prints and logs, as it prints and logs this again when training reads the sample."""
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
    """The summary of sample `index`, which is `value`."""
    exact, floats = xxh3_64(), [np.zeros(1)]
    for piece in _pieces(value):
        if isinstance(piece, np.ndarray) and _approximate(piece):
            exact.update(f"reals {piece.shape}".encode())
            flat = piece.reshape(-1)[:_MOST_NUMBERS].astype(np.float64)
            floats.append(np.nan_to_num(flat, posinf=0.0, neginf=0.0))
        elif isinstance(piece, np.ndarray):
            exact.update(f"wholes {piece.shape}".encode())
            exact.update(piece.reshape(-1)[:_MOST_NUMBERS].astype(np.int64).tobytes())
        else:
            exact.update(repr(piece).encode())
    numbers = np.concatenate(floats)
    size = math.sqrt(float(np.square(numbers).mean()))
    at = float(numbers @ np.cos(np.arange(1, len(numbers) + 1))) / math.sqrt(len(numbers))
    return SampleSummary(index, exact.hexdigest(), size, at)


def _approximate(piece: np.ndarray[Any, Any]) -> bool:
    return bool(piece.dtype.kind == "f" or piece.dtype == np.uint8)


def _pieces(value: Any) -> Iterator[Any]:
    """The arrays in `value`, and texts that describe the structure around them."""
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
    """`value` as an array of numbers, if possible; else the name of its type."""
    with suppress(TypeError, ValueError, RuntimeError):
        plain = value.detach().to("cpu") if isinstance(value, Tensor) else value
        if isinstance(plain, Tensor):
            plain = (plain.float() if plain.is_floating_point() else plain).numpy()
        found = np.asarray(plain)
        if found.dtype.kind in "fiub":
            return found
    return type(value).__qualname__
