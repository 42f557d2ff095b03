"""A private copy of this worker's tensors, in the very form in which they go to disk."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from unisono.checkpoint.container import PAGE, Container
from unisono.checkpoint.fingerprint import raw_bytes


class Staging:
    """Memory for one file. Taken and touched once, then used for every checkpoint of the same tensors.

    Args:
        container: what the file holds.
        pinned: take memory that a CUDA device can copy to while the host goes on.
    """

    def __init__(self, container: Container, pinned: bool) -> None:
        self.container = container
        length = -(-container.nbytes // PAGE) * PAGE
        self.image = _pinned(length) if pinned else _pages(length)
        image = np.frombuffer(self.image, dtype=np.uint8)
        image.fill(0)  # the kernel hands out pages at the first touch; better now than inside the copy
        image[: len(container.header)] = np.frombuffer(container.header, dtype=np.uint8)

    def copy(self, tensors: Mapping[str, Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
        """Take over the numbers; returns when they are here. Big copies do not hold the interpreter's
        lock."""
        image = np.frombuffer(self.image, dtype=np.uint8)
        for slot in self.container.slots:
            source, target = tensors[slot.name].detach(), image[slot.begin : slot.end]
            if source.is_cuda:
                like = torch.from_numpy(target).view(source.dtype).view(source.shape)
                with torch.cuda.stream(streams[source.get_device()]):
                    like.copy_(source, non_blocking=True)
            else:
                np.copyto(target, np.frombuffer(raw_bytes(source), dtype=np.uint8))
        for stream in streams:
            stream.synchronize()


def _pages(length: int) -> memoryview:
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _pinned(length: int) -> memoryview:
    return raw_bytes(torch.empty(length, dtype=torch.uint8, pin_memory=True))
