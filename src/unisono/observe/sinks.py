"""Outputs for scalars in addition to the run's own files: TensorBoard, if it is installed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger("unisono.observe")


class Sink(Protocol):
    """Takes numbers by name; never raises."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes scalars for TensorBoard to ``tensorboard/`` in the run directory, which is made for the first scalar."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "tensorboard"
        self._writer: Any = None
        self._failed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` at `step`."""
        if self._failed:
            return
        try:
            if self._writer is None:
                self._writer = _writer(self._directory)
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except Exception as error:  # an error of TensorBoard must not end the training
            self._failed = True
            _log.warning("nothing more is written for TensorBoard: %s; the run continues", error)

    def close(self) -> None:
        """Write buffered scalars."""
        if self._writer is not None and not self._failed:
            try:
                self._writer.close()
            except Exception as error:  # as above
                _log.warning("not everything was written for TensorBoard: %s", error)


def sinks(directory: Path) -> list[Sink]:
    """Every sink whose library is installed."""
    return [TensorBoard(directory)] if find_spec("tensorboard") is not None else []


def _writer(directory: Path) -> Any:
    from torch.utils.tensorboard.writer import SummaryWriter  # imports for half a second

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # TensorBoard creates files that all users can read
    return SummaryWriter(str(directory))
