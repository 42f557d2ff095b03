"""Streams tensors from file to file through a few megabytes of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_128

from unisono.checkpoint.safetensors_format import Container, Spec

CHUNK = 4 << 20  # bytes


class TensorSource(Protocol):
    """Tensors that can be read one at a time."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Dtype and shape of each tensor, by name."""
        ...

    def stream(self, name: str) -> Iterator[memoryview]:
        """The elements in row-major order, little-endian, in pieces of a few megabytes, each valid until the next."""
        ...


class Renamed:
    """Some of a source's tensors under other names.

    Args:
        names: for each new name, the tensor's name in `source`.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names
        self.specs: Mapping[str, Spec] = {new: source.specs[old] for new, old in names.items()}

    def stream(self, name: str) -> Iterator[memoryview]:
        """See `TensorSource.stream`."""
        return self._source.stream(self._names[name])


def read_exactly(descriptor: int, memory: memoryview, position: int) -> None:
    """Fill `memory` with a file's bytes from `position` on. Raises ValueError if the file ends before that."""
    while memory:
        count = os.preadv(descriptor, [memory], position)
        if not count:
            raise ValueError("it became shorter while it was read")
        memory, position = memory[count:], position + count


def write_file(path: Path, container: Container, source: TensorSource) -> dict[str, str]:
    """Write the tensors in `container` durably to a new private file; returns the digest of each.

    Raises:
        OSError: the file exists already, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    digests: dict[str, str] = {}
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(container.header)
        for slot in container.slots:
            digest = xxh3_128()
            for piece in source.stream(slot.name):
                digest.update(piece)
                file.write(piece)
            assert file.tell() == slot.end  # a source streams as many bytes as its spec has
            digests[slot.name] = digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
    return digests
