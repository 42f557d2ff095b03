"""torch's groups lie on the network that the workers met on, and what they send is counted."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tests.processes import run
from unisono.comm import Meeting, in_blocks

NUMBERS = 1 << 18
BYTES = 4 * NUMBERS
HEADERS = 2000


def sent(rank: int, size: int, path: str) -> list[int]:
    """After: connecting; a sum over all; a sum over all in a group made later; what is none of torch's."""
    before = dict(os.environ)
    meeting = Meeting(rank, in_blocks(size, size), f"file://{path}", "gloo", torch.device("cpu"), 60.0)
    world, numbers = meeting.open_world(), torch.ones(NUMBERS)
    own, found = meeting.among(range(size)), []

    def settled() -> int:
        own.gather(torch.zeros(1)).wait()  # else what was sent last may be on its way
        return world.bytes_sent

    found.append(settled())
    dist.all_reduce(numbers)
    found.append(settled())
    dist.all_reduce(numbers, group=dist.new_group(list(range(size))))
    found.append(settled())
    own.sum(numbers.clone()).wait()
    found.append(settled())
    assert numbers.eq(size**2).all()
    assert dict(os.environ) == before
    dist.destroy_process_group()
    assert world.bytes_sent == 0
    own.close()
    return found


def test_the_kernel_counts_what_torchs_groups_send(tmp_path) -> None:
    for connected, world, group, own in run(2, sent, str(tmp_path)):
        assert connected < HEADERS
        for a, b in ((connected, world), (world, group)):
            assert BYTES <= b - a < BYTES + HEADERS  # of two workers, each sends half, and then its half of the sum
        assert own == group
