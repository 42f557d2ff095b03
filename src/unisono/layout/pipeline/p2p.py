"""Point-to-point messages between pipeline workers, with headers for shapes that the receiver does not know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool, torch.complex64)  # fmt: skip
_HEADER = 256


def meta_like(value: Tensor) -> Tensor:
    """A meta tensor of the same shape, dtype and `requires_grad`."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


class StageLink:
    """Sends and receives tensors between the workers of `group`; ranks are ranks in this group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, values: Sequence[Tensor], rank: int) -> None:
        """Start to send `values` to `rank`; `flush` waits until they are sent."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        words = [len(values)]
        for value in values:
            words += [_DTYPES.index(value.dtype), int(value.requires_grad), value.dim(), *value.shape]
        if len(words) > _HEADER:
            raise ValueError(
                f"a stage sends {len(values)} tensors, which take {len(words)} numbers to describe, "
                f"and a header has {_HEADER}"
            )
        header[: len(words)] = torch.tensor(words)
        for message in (header.to(self._device), *(v.detach().contiguous() for v in values)):
            work = dist.isend(message, group=self._group, group_dst=rank)
            assert work is not None
            self._sending.append((work, message))

    def receive(self, rank: int) -> tuple[Tensor, ...]:
        """The tensors that `rank` sent: new leaves, which require gradients where the sender's do."""
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)
        dist.recv(header, group=self._group, group_src=rank)
        words = iter(header.tolist())
        values = []
        for _ in range(next(words)):
            dtype, needs, dims = _DTYPES[next(words)], bool(next(words)), next(words)
            value = torch.empty([next(words) for _ in range(dims)], dtype=dtype, device=self._device)
            dist.recv(value, group=self._group, group_src=rank)
            values.append(value.requires_grad_(needs))
        return tuple(values)

    def exchange(self, value: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Collective over `ranks`, which must include this rank: the tensor `value` of each, in the order of `ranks`.

        All of them must have the same shape and dtype.
        """
        me = dist.get_rank(self._group)
        theirs = {rank: value if rank == me else torch.empty_like(value) for rank in ranks}
        works = [dist.isend(value, group=self._group, group_dst=r) for r in ranks if r != me]
        works += [dist.irecv(theirs[r], group=self._group, group_src=r) for r in ranks if r != me]
        for work in works:
            assert work is not None
            work.wait()
        return list(theirs.values())

    def flush(self) -> None:
        """Wait until all messages are sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
