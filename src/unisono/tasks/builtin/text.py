"""A GPT that predicts the next byte of any text, by default of the standard library's sources."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from unisono.errors import InvalidInput
from unisono.tasks.builtin.gpt import GPT
from unisono.tasks.lr_schedules import Cosine
from unisono.tasks.task import Evaluation, Task

HELD_OUT = 0.05
EVALUATED_WINDOWS = 256
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def text(*, text: tuple[str, ...] = (), model: GPT = GPT()) -> Task:
    """A byte-level GPT on text; the last twentieth of the bytes is held out, for evaluation in bits per byte.

    Args:
        text: files and directories, read in the order given. A directory stands for its text files in sorted order,
            without hidden ones. Default: the Python standard library's own sources.
        model: the shape of the network.

    Raises:
        InvalidInput: a path that is missing, unreadable or without text, or too few bytes for the windows.
    """
    files = tuple(found for path in text for found in text_files(path)) if text else standard_library()
    corpus = Corpus(files)
    least = math.ceil((model.context + 1) / HELD_OUT)
    if corpus.size < least:
        problem = f"{corpus.size} bytes are too few for windows of {model.context} bytes ({least} are needed)"
        raise InvalidInput(
            "--text",
            " ".join(text) or "(the standard library)",
            problem,
            "give more text or a smaller --model.context",
        )
    return Task(
        name="text",
        model=model.build,
        data=partial(training_windows, corpus, model.context),
        loss=_loss,
        optimizer=_optimizer,
        evaluate=Evaluation(
            partial(held_out_windows, corpus, model.context),
            {"bits_per_byte": _bits},
            batch=32,
        ),
        schedule=Cosine(warmup=20, floor=0.1),
        collate=collate,
        defaults={"steps": 300, "global_batch": 32, "micro_batch": 8, "clip": 1.0},
    )


class Corpus:
    """The concatenated bytes of many files, read at first access."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)

    @property
    def size(self) -> int:
        """Bytes, by the files' sizes on disk."""
        return sum(file.stat().st_size for file in self.files)

    @cached_property
    def bytes(self) -> Tensor:
        """All bytes as one uint8 tensor (size,).

        Raises:
            InvalidInput: a file can no longer be read.
        """
        content = bytearray()
        for file in self.files:
            try:
                content += file.read_bytes()
            except OSError as error:
                raise _unreadable(file, error) from error
        return torch.frombuffer(content, dtype=torch.uint8)

    @property
    def cut(self) -> int:
        """Where the held-out bytes begin."""
        return len(self.bytes) - round(HELD_OUT * len(self.bytes))


class Windows(Dataset[Tensor]):
    """Views of ``context + 1`` bytes (uint8), one every `stride` bytes; many in one call by ``__getitems__``.

    Args:
        content: uint8 (size,), shared and never copied.
        context: bytes that go into the model; the last one of a window is only a target.
        stride: bytes between the beginnings of windows.
    """

    def __init__(self, content: Tensor, context: int, stride: int) -> None:
        self._windows = content.unfold(0, context + 1, stride)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index]

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Windows (len(indices), context + 1), gathered in one call."""
        return self._windows[torch.as_tensor(indices)]


def training_windows(corpus: Corpus, context: int) -> Windows:
    """Windows that follow each other over all but the held-out bytes."""
    return Windows(corpus.bytes[: corpus.cut], context, context)


def held_out_windows(corpus: Corpus, context: int) -> Windows:
    """At most `EVALUATED_WINDOWS` windows, spread evenly over the held-out bytes."""
    held_out = corpus.bytes[corpus.cut :]
    return Windows(held_out, context, max(context, math.ceil((len(held_out) - context) / EVALUATED_WINDOWS)))


def collate(samples: Tensor | list[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (N, context), int64, of windows: a tensor from ``__getitems__``, or a list."""
    windows = (samples if isinstance(samples, Tensor) else torch.stack(samples)).long()
    return windows[:, :-1], windows[:, 1:]


def text_files(path: str) -> list[Path]:
    """The file `path`, or the text files in the directory `path`, sorted, without hidden ones.

    Raises:
        InvalidInput: `path` is missing, cannot be read, or is a directory without text files.
    """
    place = Path(path).expanduser()
    try:
        if place.stat() and not place.is_dir():
            return [_regular(place)]
        found = [file for file in _visible(place) if _is_text(file)]
    except OSError as error:
        raise _unreadable(place, error) from error
    if not found:
        raise InvalidInput("--text", path, "a directory without text files", "name files, or a directory that has some")
    return found


def standard_library() -> tuple[Path, ...]:
    """The sources of the running Python's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return tuple(p for p in sorted(root.rglob("*.py")) if not _NOT_LIBRARY & set(p.relative_to(root).parts))


def _visible(directory: Path) -> Iterator[Path]:
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            yield from _visible(entry)
        elif entry.is_file():
            yield entry


def _regular(file: Path) -> Path:
    if not file.is_file():
        raise InvalidInput("--text", str(file), "neither a file nor a directory", "name files or directories")
    file.open("rb").close()
    return file


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(1024)


def _unreadable(path: Path, error: OSError) -> InvalidInput:
    reason = error.strerror or str(error)
    cure = "check the path" if isinstance(error, FileNotFoundError) else "name files that you may read"
    return InvalidInput("--text", str(path), f"cannot be read ({reason})", cure)


def _loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def _bits(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    nats = F.cross_entropy(output.transpose(1, 2), batch[1], reduction="none")
    return nats.mean(1) / math.log(2)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
