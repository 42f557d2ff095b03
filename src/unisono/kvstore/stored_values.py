"""The values of a store by key, as one worker reaches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from unisono.comm import ActorConnection
from unisono.errors import CheckpointMismatch, InvalidInput
from unisono.kvstore.arrays import Array, Key, copied, dtype_of
from unisono.kvstore.optimizer_states import OptimizerState
from unisono.kvstore.placement import Placement
from unisono.kvstore.value_client import ValueClient


class StoredValues:
    """A `ValueClient` for each key.

    Args:
        connections: to the servers of all workers, by rank.
    """

    def __init__(self, connections: Sequence[ActorConnection], bigarray_bound: int) -> None:
        self._connections = connections
        self._placement = Placement(len(connections), bigarray_bound)
        self._clients: dict[Key, ValueClient] = {}

    def __iter__(self) -> Iterator[ValueClient]:
        return iter(self._clients.values())

    def __getitem__(self, key: Key) -> ValueClient:
        """Raises `InvalidInput` if the key is not initialized."""
        if key not in self._clients:
            raise InvalidInput("key", key, "it is not initialized", "call init on all workers first")
        return self._clients[key]

    def check_new(self, key: Key, arrays: Sequence[Array]) -> Array:
        """The one array with which `key` can be initialized.

        Raises:
            InvalidInput: the key is initialized, is of another type than others, or there are several arrays.
        """
        if key in self._clients:
            raise InvalidInput("key", key, "it is initialized already", "initialize each key once")
        if self._clients and not isinstance(key, type(next(iter(self._clients)))):
            raise InvalidInput("key", key, "other keys are not of this type", "use one kind of key in a store")
        if len(arrays) > 1:
            raise InvalidInput("key", key, f"it has {len(arrays)} values", "initialize it with one")
        return arrays[0]

    def add(self, key: Key, array: Array, is_source: bool) -> None:
        """Add `key`; the worker that `is_source` sends its array to where the parts are stored, and waits for that."""
        dtype, shape = dtype_of(array), tuple(array.shape)
        parts = self._placement.place(shape, dtype.itemsize)
        client = self._clients[key] = ValueClient(key, shape, dtype, parts, self._connections)
        if is_source:
            client.init(copied(array, torch.device("cpu"), dtype), isinstance(array, np.ndarray))

    @property
    def divided(self) -> Key | None:
        """A key whose value has several parts."""
        return next((key for key, client in self._clients.items() if len(client.parts) > 1), None)

    def optimizer_states(self, with_groups: bool) -> dict[Key, OptimizerState]:
        """The state of the optimizer of each key; its hyperparameters too, `with_groups`."""
        found = {}
        for key, client in self._clients.items():
            client.finish_push()
            state, groups = client.optimizer_state()
            found[key] = OptimizerState(client.shape, state, groups if with_groups else [])
        return found

    def load_optimizer_states(self, states: Mapping[Key, OptimizerState], source: str) -> None:
        """Load what `optimizer_states` returned.

        Raises:
            CheckpointMismatch: `source`, from which it was read, has other keys or shapes.
        """
        there = {key: each.shape for key, each in states.items()}
        here = {key: client.shape for key, client in self._clients.items()}
        for key in [*here, *there]:
            if here.get(key) != there.get(key):
                own, other = (list(each[key]) if key in each else "nothing" for each in (here, there))
                raise CheckpointMismatch(f"{source}: key {key!r} is {other} in the file and {own} here")
        for key, client in self._clients.items():
            client.finish_push()
            client.load_optimizer_state(states[key].state, states[key].groups)
