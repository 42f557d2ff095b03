"""What a compressor is handed to remember from step to step; a step that is dropped leaves it as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class CompressorMemory:
    """What one sender keeps for one flat tensor: residuals, warm starts, counters.

    What is put counts from `commit` on, so that a step is a transaction. Kept by whoever drives the compressor; void
    when the number of peers changes.
    """

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}
        self._coming: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}
        self._parts: dict[str, CompressorMemory] = {}
        self._forgotten: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """What was put under `key` before the last commit; not to be written into."""
        return self._held.get(key, default)

    def put(self, key: str, value: Any) -> None:
        """`get` gives `value` after the next commit."""
        self._coming[key] = value

    def spare(self, key: str) -> Any:
        """What `get` gave before it gave what it gives now, or None: memory that may be written into and put again.
        Given once."""
        return self._spare.pop(key, None)

    def part(self, key: str) -> CompressorMemory:
        """A memory of its own, committed and discarded with this one."""
        return self._parts.setdefault(key, CompressorMemory())

    def forget(self, key: str) -> None:
        """The part under `key` is void after the next commit."""
        self._forgotten.add(key)

    def commit(self) -> None:
        """The step is taken."""
        for key in self._forgotten:
            self._parts.pop(key, None)
        self._forgotten.clear()
        for key, value in self._coming.items():
            if key in self._held:
                self._spare[key] = self._held[key]
            self._held[key] = value
        self._coming.clear()
        for part in self._parts.values():
            part.commit()

    def discard(self) -> None:
        """The step is dropped."""
        self._coming.clear()
        self._forgotten.clear()
        for part in self._parts.values():
            part.discard()

    def state_dict(self) -> dict[str, Tensor]:
        """What was put before the last commit, by ``part/key``, as a checkpoint holds it: tensors, which are not to be
        written into, and whole numbers. All else (a choice that was measured) is found anew."""
        state = {key: torch.tensor(v) if type(v) is int else v for key, v in self._held.items()}
        found = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        return found | {f"{at}/{key}": v for at, part in self._parts.items() for key, v in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Keep copies, on `device`, of what `state_dict` said in another life."""
        for path, value in state.items():
            at, _, key = path.rpartition("/")
            part = self
            for name in filter(None, at.split("/")):
                part = part.part(name)
            number = value.shape == () and value.dtype == torch.int64
            part._held[key] = int(value) if number else value.to(device, copy=True)


def accumulated(x: Tensor, memory: CompressorMemory, key: str, factor: float = 1.0) -> Tensor:
    """``x + factor * what memory keeps under key``, kept in its place; may be written into until the commit."""
    kept, spare = memory.get(key), memory.spare(key)
    out = torch.empty_like(x) if spare is None else spare
    memory.put(key, out)
    return out.copy_(x) if kept is None else torch.add(x, kept, alpha=factor, out=out)
