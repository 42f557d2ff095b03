"""The image of a part file: a copy of the tensors or, if they do not change meanwhile, a window on them."""

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

CHUNK = 32 << 20  # bytes per write: so large that the GIL is rarely taken
WINDOW = 8 << 20  # bytes per write while nothing trains
PIECE = 512 << 10  # bytes: half of a small second-level cache, and enough for numpy to release the GIL


class Image(Protocol):
    """The content of a file that is being written.

    Attributes:
        container: the file's header, and the positions of tensors in it.
        tensors: the boxes in the file, with their digests; complete after the last chunk.
    """

    container: Container
    tensors: Mapping[str, Entry]

    def chunks(self) -> Iterator[memoryview]:
        """The file from its beginning, in whole pages; each chunk is valid until the next is requested."""
        ...


class Staging:
    """A copy of the tensors. Its memory is allocated once, and reused for checkpoints of the same tensors.

    Args:
        shards: the shards in the file, by name.
        pinned: whether to allocate pinned memory, to which a CUDA device copies asynchronously.
    """

    def __init__(self, shards: Mapping[str, TensorShard], pinned: bool) -> None:
        self._shards, self.container = shards, _container(shards)
        self.tensors: Mapping[str, Entry] = {}
        length = -(-self.container.nbytes // PAGE) * PAGE
        self.image = _pinned(length) if pinned else _pages(length)
        image = np.frombuffer(self.image, dtype=np.uint8)
        image.fill(0)  # the kernel maps pages at first access: now, not inside the copy
        header = np.frombuffer(self.container.header, dtype=np.uint8)
        image[: len(header)] = header

    def copy(self, tensors: Mapping[str, Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
        """Copy the elements of `tensors`; returns when the copy is complete. Large copies release the GIL."""
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
        self.tensors = {slot.name: Entry(self._shards[slot.name], digests[slot.name]) for slot in self.container.slots}

    def chunks(self) -> Iterator[memoryview]:
        """See `Image.chunks`."""
        for begin in range(0, len(self.image), CHUNK):
            yield self.image[begin : begin + CHUNK]


class Window:
    """Tensors that do not change until they are written; at most `WINDOW` bytes are copied at a time.

    Args:
        shards: the shards in the file, by name.
        tensors: the tensors of this worker, by name.
    """

    def __init__(self, shards: Mapping[str, TensorShard], tensors: Mapping[str, Tensor]) -> None:
        self._shards, self._tensors, self.container = shards, tensors, _container(shards)
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
                found[name] = Entry(self._shards[name], digest.hexdigest())
        self.tensors = found
        if filled:
            yield image[: -(-filled // PAGE) * PAGE]

    def _contents(self) -> Iterator[tuple[str | None, memoryview]]:
        """The header, which has no name, and every tensor, in the file's order."""
        yield None, memoryview(self.container.header)
        for slot in self.container.slots:
            yield slot.name, raw_bytes(self._tensors[slot.name].detach())


def _container(shards: Mapping[str, TensorShard]) -> Container:
    return container({name: shard.spec for name, shard in shards.items()})


def _copy_and_digest(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> str:
    """Copy `source`, and hash each piece while it is in the cache, so that memory is read once."""
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
