"""One worker's access to the value of one key, whose parts may be stored at several workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.comm import ActorConnection, ActorMessage, Work
from unisono.compress import Compressor, CompressorMemory
from unisono.elastic.extra_state import to_tensors
from unisono.errors import InvalidInput, PeerLost, UnisonoError
from unisono.kvstore.arrays import Array, Key, check_fits, copied, dtype_of, rows_of, write
from unisono.kvstore.gradient_compression import compressor_of
from unisono.kvstore.placement import Part
from unisono.kvstore.server import FAILED, STATE, WORKERS_LOST, received_state

Fetch = list[tuple[Part, Work[ActorMessage]]]
"""Calls in flight, one for each part of a value."""
_HOST = torch.device("cpu")


class ValueClient:
    """The value of `key`: its shape, its dtype, and calls to the workers that store its parts.

    Args:
        connections: to the servers of all workers, by rank.
    """

    def __init__(
        self,
        key: Key,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: Sequence[Part],
        connections: Sequence[ActorConnection],
    ) -> None:
        self.key, self.shape, self.dtype, self.parts = key, shape, dtype, parts
        self._connections = connections
        self._pushes: list[Work[ActorMessage]] = []
        self._residuals: defaultdict[int, CompressorMemory] = defaultdict(CompressorMemory)

    def init(self, value: Tensor, as_numpy: bool) -> None:
        """Store `value`; returns when it is stored."""
        calls = [
            self._call("init", part, {"shape": list(part.shape), "numpy": as_numpy}, rows_of(value, part))
            for part in self.parts
        ]
        self._wait(calls)

    def push(self, total: Tensor, compression_params: Mapping[str, Any] | None) -> None:
        """Push `total`, which may be overwritten; waits for this worker's previous push."""
        self.finish_push()
        for part in self.parts:
            flat, fields = rows_of(total, part).reshape(-1), {}
            if compression_params is not None:
                flat = self._compressed(part.number, flat, compressor_of(compression_params))
                fields = {"compress": dict(compression_params)}
            self._pushes.append(self._call("push", part, fields, flat))

    def finish_push(self) -> None:
        """Return when the last push is applied."""
        pushes, self._pushes = self._pushes, []
        self._wait(pushes)

    def added(self, arrays: Sequence[Array], on_device: bool, compression_params: Mapping[str, Any] | None) -> Tensor:
        """The sum of the arrays of all devices: a new tensor in host memory.

        Args:
            on_device: add on the device of the first array.
            compression_params: by which each array is compressed before it is added.

        Raises:
            InvalidInput: an array has another shape, or a dtype that does not convert.
        """
        first = arrays[0]
        device = first.device if on_device and isinstance(first, Tensor) else _HOST
        total: Tensor | None = None
        for number, array in enumerate(arrays):
            check_fits(f"value of key {self.key!r}", array, self.shape, dtype_of(array), self.dtype)
            own = copied(array, device, self.dtype)
            if compression_params is not None:
                own = self._after_compression(number, own, compressor_of(compression_params))
            total = own if total is None else total.add_(own)
        assert total is not None
        return total.to(_HOST)

    def forget_residuals(self) -> None:
        """Begin with empty residuals, for another compressor."""
        self._residuals.clear()

    def pull(self) -> Fetch:
        """Request the value."""
        return [(part, self._call("pull", part)) for part in self.parts]

    def receive(self, fetch: Fetch, outs: Sequence[Array]) -> None:
        """Write the value that `pull` has requested into each of `outs`."""
        self._pushes.clear()  # an answer to a pull comes after those to the pushes before it
        for part, call in fetch:
            value = self.answer(call).tensors[0].view(part.shape)
            for out in outs:
                write(rows_of(out, part), value)

    def pull_rows(self, numbers: Tensor) -> list[tuple[Tensor, Work[ActorMessage]]]:
        """Request rows by their sorted `numbers`; returns the numbers that each call is about."""
        calls = []
        for part in self.parts:
            mine = numbers[(numbers >= part.start) & (numbers < part.stop)]
            if len(mine):
                calls.append((mine, self._call("rows", part, {}, mine - part.start)))
        return calls

    def receive_rows(self, fetch: list[tuple[Tensor, Work[ActorMessage]]], out: Array) -> None:
        """Write the rows that `pull_rows` has requested into `out`, and zeros into the others."""
        whole = torch.zeros(self.shape, dtype=self.dtype)
        for numbers, call in fetch:
            whole[numbers] = self.answer(call).tensors[0].view(-1, *self.shape[1:])
        write(out, whole)

    def optimizer_state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """State and hyperparameters of the optimizer, as if one optimizer had stepped the whole value."""
        calls = [self._call("state", part) for part in self.parts]
        found = [received_state(self.answer(call)) for call in calls]
        states = [each["state"] for each in found]
        return self._joined(states) if all(states) else {}, found[0]["groups"]

    def load_optimizer_state(self, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Continue with what `optimizer_state` returned, on any number of workers; returns when it is loaded."""
        calls = []
        for part in self.parts:
            own = {name: rows_of(x, part) if self._is_divided(x) else x for name, x in state.items()}
            tensors = to_tensors(STATE, {"state": own, "groups": list(groups)})
            fields = {"shapes": {name: list(x.shape) for name, x in tensors.items()}}
            calls.append(self._call("load", part, fields, *tensors.values()))
        self._wait(calls)

    def answer(self, call: Work[ActorMessage]) -> ActorMessage:
        """The answer to `call`.

        Raises:
            PeerLost: the worker that stores the part is lost, or one whose push is missing.
            UnisonoError: the update failed.
        """
        try:
            answer = call.wait()
        except PeerLost as error:
            error.add_note("a worker that ends takes the values with it that it stores: kv.close() waits for all")
            raise
        if answer.kind == WORKERS_LOST:
            raise PeerLost(answer.fields["workers"], f"push of key {self.key!r}", "it has not pushed")
        if answer.kind == FAILED:
            raise UnisonoError(f"key = {self.key!r}: its update failed with {answer.fields['error']}")
        return answer

    def _call(self, kind: str, part: Part, fields: Mapping[str, Any] = {}, *tensors: Tensor) -> Work[ActorMessage]:
        message = ActorMessage(kind, {"key": self.key, "part": part.number, **fields}, tensors)
        return self._connections[part.worker].call(message)

    def _wait(self, calls: Sequence[Work[ActorMessage]]) -> None:
        for call in calls:
            self.answer(call)

    def _after_compression(self, number: int, value: Tensor, compress: Compressor) -> Tensor:
        """What a receiver makes of the message for `value`, of device `number`."""
        message = self._compressed(number, value.view(-1), compress)
        return compress.decode(message, (), value.numel(), value.dtype).view(value.shape)

    def _compressed(self, number: int, flat: Tensor, compress: Compressor) -> Tensor:
        if self.dtype != torch.float32:
            raise InvalidInput("dtype", str(self.dtype).removeprefix("torch."), f"gradients of key {self.key!r} are "
                               "compressed as float32", "initialize the key with float32")  # fmt: skip
        memory = self._residuals[number]
        message = compress.encode_with_feedback(flat, (), memory)
        memory.commit()
        return message

    def _is_divided(self, value: Any) -> bool:
        """Whether `value` is a tensor of the optimizer's state with an element for each of the stored value."""
        return isinstance(value, Tensor) and value.shape == self.shape

    def _joined(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The states of all parts as that of the whole value."""
        if len(states) == 1:
            return dict(states[0])
        shapes = [part.shape for part in self.parts]

        def has_rows(name: str) -> bool:
            values = [state[name] for state in states]
            return all(isinstance(x, Tensor) and x.shape == shape for x, shape in zip(values, shapes))

        return {
            name: torch.cat([state[name] for state in states]) if has_rows(name) else first
            for name, first in states[0].items()
        }
