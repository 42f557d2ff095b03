"""The state of a compressor from step to step, which a discarded step leaves unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RESIDUAL = "owed"  # the key of the error-feedback residual, in memory and in checkpoints


class CompressorMemory:
    """The state of one sender for one flat tensor: residuals, warm starts, counters.

    Values that are put become visible with `commit`, so a step is a transaction. The synchronizer that runs the
    compressor owns the memory, and drops it when the number of peers changes.
    """

    def __init__(self) -> None:
        self._committed: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}
        self._parts: dict[str, CompressorMemory] = {}
        self._forgotten: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value that was put under `key` before the last commit; to be read only."""
        return self._committed.get(key, default)

    def put(self, key: str, value: Any) -> None:
        """Set the value that `get` returns after the next commit."""
        self._pending[key] = value

    def spare(self, key: str) -> Any:
        """The value that the current one under `key` has replaced, or None.

        The caller may overwrite its memory and `put` it again. It is returned once per commit.
        """
        return self._spare.pop(key, None)

    def part(self, key: str) -> CompressorMemory:
        """A nested memory, committed and discarded with this one."""
        return self._parts.setdefault(key, CompressorMemory())

    def forget(self, key: str) -> None:
        """Remove the part under `key` with the next commit."""
        self._forgotten.add(key)

    def commit(self) -> None:
        """Keep what was put in this step."""
        for key in self._forgotten:
            self._parts.pop(key, None)
        self._forgotten.clear()
        for key, value in self._pending.items():
            if key in self._committed:
                self._spare[key] = self._committed[key]
            self._committed[key] = value
        self._pending.clear()
        for part in self._parts.values():
            part.commit()

    def discard(self) -> None:
        """Drop what was put in this step."""
        self._pending.clear()
        self._forgotten.clear()
        for part in self._parts.values():
            part.discard()

    def state_dict(self) -> dict[str, Tensor]:
        """The committed tensors and whole numbers by ``part/key``, for a checkpoint; the tensors are read-only.

        Other values, such as a measured choice, are not saved but measured again.
        """
        state = {key: torch.tensor(v) if type(v) is int else v for key, v in self._committed.items()}
        saved = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        return saved | {f"{at}/{key}": v for at, part in self._parts.items() for key, v in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Load copies, on `device`, of the `state_dict` of an earlier attempt."""
        for path, value in state.items():
            at, _, key = path.rpartition("/")
            part = self
            for name in filter(None, at.split("/")):
                part = part.part(name)
            number = value.shape == () and value.dtype == torch.int64
            part._committed[key] = int(value) if number else value.to(device, copy=True)


def accumulated(x: Tensor, memory: CompressorMemory, key: str, factor: float = 1.0) -> Tensor:
    """Put ``x + factor * memory.get(key)`` into `memory`, and return it; it may be written into until the commit."""
    old, spare = memory.get(key), memory.spare(key)
    out = torch.empty_like(x) if spare is None else spare
    memory.put(key, out)
    return out.copy_(x) if old is None else torch.add(x, old, alpha=factor, out=out)
