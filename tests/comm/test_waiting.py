"""What a communicator waits for, as another thread sees it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from tests import processes
from unisono.comm import connect


@pytest.mark.parametrize(("kind", "missing"), [("shared_memory", (1,)), ("gloo", ())])
def test_another_thread_sees_which_message_of_which_lane_is_waited_for_and_of_whom(kind, missing, tmp_path) -> None:
    os.mkfifo(tmp_path / "seen")
    seen, _ = processes.run(2, _wait, kind, tmp_path)
    assert seen == [("", ()), ("gather (second, message 1)", missing), ("", ())]


def _wait(rank: int, size: int, kind: str, path: Path) -> list[tuple[str, tuple[int, ...]]]:
    comm = connect(rank, size, rendezvous=f"file://{path}/store", local_size=size, kind=kind)
    lane = comm.lane("second")
    lane.sum(torch.ones(3)).wait()
    seen = [comm.waits_for]

    def look() -> None:
        while not (found := comm.waits_for)[0]:
            time.sleep(0.001)
        seen.append(found)
        (path / "seen").write_text("it is")

    if rank == 0:
        looking = threading.Thread(target=look)
        looking.start()
    else:
        (path / "seen").read_text()  # waits until it is
    lane.gather(torch.ones(3)).wait()
    if rank == 0:
        looking.join()
    seen.append(comm.waits_for)
    comm.close()
    return seen
