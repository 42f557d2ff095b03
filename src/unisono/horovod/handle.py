"""An operation that this worker has submitted, and that a thread of `Negotiation` executes."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.horovod.errors import HorovodInternalError
from unisono.horovod.requests import Request

Unpack = Callable[[list[Tensor]], Any]


@dataclass
class Times:
    """When an operation was submitted, agreed on by all workers, and executed, in seconds of `time.time`."""

    submitted: float
    agreed: float = 0.0
    finished: float = 0.0


class Handle:
    """An operation in flight.

    Args:
        request: its description.
        tensors: its inputs, which its caller does not change until it is finished.
        outputs: where results are written; None: the operation makes them.
        unpack: makes the result of the outputs.

    Attributes:
        times: of its stages.
        on_finished: called with this handle just before its result is available.
    """

    def __init__(
        self, request: Request, tensors: Sequence[Tensor], outputs: Sequence[Tensor] | None, unpack: Unpack
    ) -> None:
        self.request, self.tensors, self.outputs = request, list(tensors), outputs
        self.times = Times(time.time())
        self.on_finished: Callable[[Handle], None] = lambda handle: None
        self._unpack = unpack
        self._done = threading.Event()
        self._result: Any = None
        self._error: HorovodInternalError | None = None
        # The executing thread has a stream of its own, which must not read before the caller's kernels have written.
        self._written = [torch.cuda.current_stream(x.device).record_event() for x in tensors[:1] if x.is_cuda]

    def ready_inputs(self) -> list[Tensor]:
        """The inputs, in the thread that executes the operation."""
        for x, event in zip(self.tensors, self._written):
            torch.cuda.current_stream(x.device).wait_event(event)
        return self.tensors

    def finish(self, outputs: list[Tensor]) -> None:
        """The operation has these outputs."""
        for x in outputs[:1]:
            if x.is_cuda:
                torch.cuda.current_stream(x.device).synchronize()
        self._result = self._unpack(outputs)
        self._settle()

    def fail(self, error: HorovodInternalError) -> None:
        """The operation has failed; no effect once it is finished."""
        if not self._done.is_set():
            self._error = error
            self._settle()

    def poll(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until it is finished, at most `seconds`; returns whether it is."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """The result of a finished operation. Raises `HorovodInternalError`."""
        if self._error is not None:
            raise copy.copy(self._error)  # the traceback of a stored error would keep its caller's variables
        return self._result

    def _settle(self) -> None:
        self.times.finished = time.time()
        self.tensors, self.outputs = [], None
        self.on_finished(self)
        self._done.set()
