"""The memory that workers can use on this machine."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a machine, or of one of its GPUs.

    Args:
        name: what the memory belongs to: ``this machine``, or the name of the GPU.
        bytes: the size of the memory.
        shared: whether all workers of the machine share the memory; if not, each has a GPU of its own.
    """

    name: str
    bytes: int
    shared: bool


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of this machine, as far as this process may use it, or of its GPU."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return DeviceMemory(found.name, found.total_memory, shared=False)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceMemory("this machine", min([machine, *_limits()]), shared=True)


def _limits() -> list[int]:
    """The limits of memory of this process's control groups, in bytes."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
        group = Path("/sys/fs/cgroup") / line.removeprefix("0::").strip("/")
        found = [place / "memory.max" for place in (group, *group.parents) if (place / "memory.max").exists()]
        return [int(text) for file in found if (text := file.read_text().strip()).isdigit()]
    return []
