"""This worker's tensors in the very form in which they go to disk: a private copy, or, where nothing changes them
meanwhile, a window that moves over them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128

from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.manifest import Entry
from unisono.checkpoint.ownership import TensorShard
from unisono.checkpoint.safetensors_format import PAGE, Container, container

CHUNK = 32 << 20  # bytes per write: long enough that the interpreter's lock is rarely asked for
WINDOW = 8 << 20  # bytes per write while nothing trains
PIECE = 512 << 10  # bytes: half of a small second-level cache, and enough to let go of the interpreter's lock


class Image(Protocol):
    """One file on its way.

    Attributes:
        container: what lies where in it.
        tensors: what it holds, with digests; known when the last chunk is taken.
    """

    container: Container
    tensors: Mapping[str, Entry]

    def chunks(self) -> Iterator[memoryview]:
        """The file from its beginning, in pages; each chunk is good until the next is asked for."""
        ...


class Staging:
    """Memory for one file. Taken and touched once, then used for every checkpoint of the same tensors.

    Args:
        pieces: what the file holds, by name.
        pinned: take memory that a CUDA device can copy to while the host goes on.
    """

    def __init__(self, pieces: Mapping[str, TensorShard], pinned: bool) -> None:
        self._pieces, self.container = pieces, _container(pieces)
        self.tensors: Mapping[str, Entry] = {}
        length = -(-self.container.nbytes // PAGE) * PAGE
        self.image = _pinned(length) if pinned else _pages(length)
        image = np.frombuffer(self.image, dtype=np.uint8)
        image.fill(0)  # the kernel hands out pages at the first touch; better now than inside the copy
        header = np.frombuffer(self.container.header, dtype=np.uint8)
        image[: len(header)] = header

    def copy(self, tensors: Mapping[str, Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
        """Take over the numbers; returns when they are here. Big copies do not hold the interpreter's
        lock."""
        image = np.frombuffer(self.image, dtype=np.uint8)
        digests: dict[str, str] = {}
        for slot in self.container.slots:
            source, target = tensors[slot.name].detach(), image[slot.begin : slot.end]
            if source.is_cuda:
                like = torch.from_numpy(target).view(source.dtype).view(source.shape)
                with torch.cuda.stream(streams[source.get_device()]):
                    like.copy_(source, non_blocking=True)
            else:
                digests[slot.name] = _copy_and_digest(target, np.frombuffer(raw_bytes(source), dtype=np.uint8))
        for stream in streams:
            stream.synchronize()
        for slot in self.container.slots:
            if slot.name not in digests:
                digests[slot.name] = xxh3_128(self.image[slot.begin : slot.end]).hexdigest()
        self.tensors = {slot.name: Entry(self._pieces[slot.name], digests[slot.name]) for slot in self.container.slots}

    def chunks(self) -> Iterator[memoryview]:
        """See `Image.chunks`."""
        for begin in range(0, len(self.image), CHUNK):
            yield self.image[begin : begin + CHUNK]


class Window:
    """Tensors that do not change until they are written: no more than `WINDOW` bytes of them are copied at any time.

    Args:
        pieces: what the file holds, by name.
        tensors: this worker's, by name.
    """

    def __init__(self, pieces: Mapping[str, TensorShard], tensors: Mapping[str, Tensor]) -> None:
        self._pieces, self._tensors, self.container = pieces, tensors, _container(pieces)
        self.tensors: Mapping[str, Entry] = {}

    def chunks(self) -> Iterator[memoryview]:
        """See `Image.chunks`."""
        image, filled, found = _pages(WINDOW), 0, dict[str, Entry]()
        for name, content in self._contents():
            digest = xxh3_128()
            while content:
                taken = min(len(content), WINDOW - filled)
                digest.update(content[:taken])
                image[filled : filled + taken], content = content[:taken], content[taken:]
                filled += taken
                if filled == WINDOW:
                    yield image
                    filled = 0
            if name is not None:
                found[name] = Entry(self._pieces[name], digest.hexdigest())
        self.tensors = found
        if filled:
            yield image[: -(-filled // PAGE) * PAGE]

    def _contents(self) -> Iterator[tuple[str | None, memoryview]]:
        """The header, which has no name, and every tensor, in the file's order."""
        yield None, memoryview(self.container.header)
        for slot in self.container.slots:
            yield slot.name, raw_bytes(self._tensors[slot.name].detach())


def _container(pieces: Mapping[str, TensorShard]) -> Container:
    return container({name: piece.spec for name, piece in pieces.items()})


def _copy_and_digest(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> str:
    """Copy, and hash each piece while it is still in the processor's cache: the memory is read once for both."""
    digest = xxh3_128()
    for begin in range(0, len(source), PIECE):
        piece = target[begin : begin + PIECE]
        np.copyto(piece, source[begin : begin + PIECE])
        digest.update(piece.data)
    return digest.hexdigest()


def _pages(length: int) -> memoryview:
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _pinned(length: int) -> memoryview:
    return raw_bytes(torch.empty(length, dtype=torch.uint8, pin_memory=True))
