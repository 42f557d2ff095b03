"""The shapes in a checkpoint are compared with the model before memory is allocated."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from unisono.checkpoint import OpenedCheckpoint, Writer, open_checkpoint
from unisono.comm import SingleWorker
from unisono.errors import CheckpointMismatch
from unisono.trainer.checkpoint_restorer import CheckpointScope
from unisono.trainer.checkpointing import Checkpointer


def written(directory: Path, tensors: dict[str, Tensor]) -> OpenedCheckpoint:
    with closing(Writer(directory, 0, 1, 1, print, "test")) as writer:
        writer.write(1, tensors, {"config": {}})
        writer.finish()
        writer.commit(1)
        writer.finish()
    (made,) = directory.glob("step-*")
    return open_checkpoint(made)


@pytest.mark.parametrize(
    ("beside", "problem"),
    [
        ({"model/weight": torch.zeros(8, 8)}, r"'model/weight' is float32 \[2, 2\] here and float32 \[8, 8\]"),
        ({"model/other": torch.zeros(8)}, "'model/other' .*, which this model does not have"),
        ({"optimizer/state": torch.zeros(80 << 20, dtype=torch.uint8)}, "more than 256 times as much"),
        ({"sync/anchor": torch.zeros(80 << 20, dtype=torch.uint8)}, "more than 256 times as much"),
    ],
)
def test_nothing_is_read_of_what_does_not_belong_to_the_model(beside, problem, tmp_path, monkeypatch) -> None:
    model = nn.Linear(2, 2, bias=False)
    found = written(tmp_path, {"model/weight": torch.zeros(2, 2), **beside})
    monkeypatch.setattr(OpenedCheckpoint, "read", lambda *_: pytest.fail("memory was taken"))
    persistence = Checkpointer(
        CheckpointScope(model, torch.optim.SGD(model.parameters(), 0.1), SingleWorker(), {"config": {}})
    )
    with pytest.raises(CheckpointMismatch, match=problem):
        persistence.resume(found)
