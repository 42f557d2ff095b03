"""The interface of MXNet's KVStore, as one worker uses it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.text import broadcast_text, gather_text
from unisono.errors import CheckpointError, InvalidInput, MessageMismatch, UnisonoError
from unisono.kvstore import optimizer_states
from unisono.kvstore.arrays import Array, Arrays, Key, check_out, dtype_of, grouped, row_numbers
from unisono.kvstore.gradient_compression import compressor_of
from unisono.kvstore.server import ValueServer
from unisono.kvstore.stored_values import StoredValues
from unisono.kvstore.updates import OptimizerFactory, OptimizerStep, Replacement, Update, Updater, UpdaterCall

Keys = Key | Sequence[Key]


@dataclass(frozen=True)
class StoreType:
    """A kind of store.

    Args:
        name: MXNet's.
        distributed: whether its values are those of all workers, not of one process.
        synchronous: whether a push is applied with those of all workers.
        on_device: whether the arrays of several devices are added on the first of them, not in host memory.
    """

    name: str
    distributed: bool = False
    synchronous: bool = True
    on_device: bool = False


class KVStore:
    """Values by key, which workers push to and pull from, as in MXNet's KVStore; `create` makes one.

    Keys are integers, or texts. A method takes one key, or a list of keys with a list of as many entries. An entry is
    one array (numpy, or a torch tensor), or a list with one array per device. Those of a push are added; a pull writes
    into each. Pushed arrays are converted to the dtype of the stored value, pulled values to that of the array.

    Stored values, and what updates them, are in host memory: of this process, or distributed over the workers. A push
    returns before it is applied; errors of an update are raised by the next call about its key. `priority` is taken
    for compatibility, and has no effect. One thread uses a store.

    Attributes:
        rank: of this worker; 0 in a store of one process.
        num_workers: 1 in a store of one process.
    """

    def __init__(
        self, kind: StoreType, comm: Communicator, *, bigarray_bound: int, leave: Callable[[], None] = lambda: None
    ) -> None:
        self._kind, self._leave, self._closed = kind, leave, False
        self._comm = comm.channel("kvstore")
        self.rank, self.num_workers = comm.rank, comm.size
        self._server = ValueServer(comm.size, kind.synchronous)
        self._connections = self._comm.host(self._server)
        self._values = StoredValues(self._connections, bigarray_bound)
        self._compression: Mapping[str, Any] | None = None

    @property
    def type(self) -> str:
        """The name that `create` was called with, in lower case."""
        return self._kind.name

    def init(self, key: Keys, value: Arrays) -> None:
        """Collective: store the values that worker 0 passes; to be called once for each key, before its first use.

        Raises:
            InvalidInput: a key is initialized already, is neither int nor str, or a value is not one array.
            MessageMismatch: another worker passes other keys, shapes or dtypes.
        """
        arrays = {name: self._values.check_new(name, each) for name, each in grouped(key, value, "value").items()}
        _agree(self._comm, *[f"init of key {name!r}, {dtype_of(x)} {list(x.shape)}" for name, x in arrays.items()])
        for name, array in arrays.items():
            self._values.add(name, array, is_source=self.rank == 0)
        self._check_steps_parts(self._server.update)
        _agree(self._comm, "end of init")

    def push(self, key: Keys, value: Arrays, priority: int = 0) -> None:
        """Push values: what is pushed replaces the stored value, or updates it if there is an updater or optimizer.

        With several workers, ``dist_sync`` applies the sum of one push of each worker, and ``dist_async`` each push as
        it comes. A second push of a key waits until the first one is applied.

        Raises:
            InvalidInput: a key is not initialized, an array has another shape, or the type is ``dist_async`` and there
                is no updater or optimizer.
        """
        if not self._kind.synchronous and isinstance(self._server.update, Replacement):
            raise InvalidInput("type", self.type, "each push is an update of its own, and there is no optimizer",
                               "call set_optimizer or set_updater on all workers first")  # fmt: skip
        per_device, sent = (None, self._compression) if self._kind.distributed else (self._compression, None)
        for name, arrays in grouped(key, value, "value").items():
            client = self._values[name]
            client.push(client.added(arrays, self._kind.on_device, per_device), sent)
            if self.num_workers == 1:
                client.finish_push()

    def pull(self, key: Keys, out: Arrays | None = None, priority: int = 0) -> None:
        """Write stored values into `out`, which include all pushes of this worker.

        Raises:
            InvalidInput: a key is not initialized, or an array has another shape or is read-only.
        """
        wanted = [(self._values[name], outs) for name, outs in grouped(key, out, "out").items()]
        for client, outs in wanted:
            for each in outs:
                check_out(f"out of key {client.key!r}", each, client.shape, client.dtype)
        fetches = [(client, client.pull(), outs) for client, outs in wanted]
        for client, fetch, outs in fetches:
            client.receive(fetch, outs)

    def pushpull(self, key: Keys, value: Arrays, out: Arrays | None = None, priority: int = 0) -> None:
        """`push`, then `pull` into `out`, or into `value` where `out` is None. Raises as both."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def broadcast(self, key: Keys, value: Arrays, out: Arrays, priority: int = 0) -> None:
        """Collective: `init`, then `pull` into `out`. Raises as both."""
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(
        self, key: Keys, out: Arrays | None = None, priority: int = 0, row_ids: Arrays | None = None
    ) -> None:
        """Write some rows of stored values into `out`, dense arrays of the value's shape; other rows become zero.

        Only these rows are transferred.

        Args:
            row_ids: row numbers, in any order and repeated or not: one array for each of `out`, or one for all.

        Raises:
            InvalidInput: as `pull`; or a row does not exist.
        """
        outs = grouped(key, out, "out")
        wanted = []
        for name, ids in _row_ids(key, outs, row_ids).items():
            client = self._values[name]
            if not client.shape:
                raise InvalidInput("key", name, "its value has no rows", "call pull")
            for array, each in zip(outs[name], ids):
                check_out(f"out of key {name!r}", array, client.shape, client.dtype)
                wanted.append((client, row_numbers(each, client.shape[0], f"row_ids of key {name!r}"), array))
        fetches = [(client, client.pull_rows(numbers), array) for client, numbers, array in wanted]
        for client, fetch, array in fetches:
            client.receive_rows(fetch, array)

    def set_optimizer(self, optimizer: OptimizerFactory) -> None:
        """Collective: from now on a push is a gradient, with which a torch optimizer updates the stored value.

        All workers pass the same function. A value, or a part of it, has an optimizer of its own, with an empty state.

        Args:
            optimizer: makes a torch optimizer of a list of parameters.

        Raises:
            InvalidInput: it does not; or it is not elementwise, and a value is divided among the workers.
        """
        self._set_update("set_optimizer", OptimizerStep(optimizer))

    def set_updater(self, updater: Updater) -> None:
        """Collective: from now on a push calls ``updater(key, received, stored)``, which changes `stored` in place.

        All workers pass the same function. It is called on the worker that stores the value, by one thread at a time;
        with a part of the rows, if the value is divided. The arrays are of the kind that `init` got on worker 0.

        Raises:
            InvalidInput: it cannot be called.
        """
        if not callable(updater):
            raise InvalidInput("updater", type(updater).__name__, "it cannot be called",
                               "pass a function of key, received and stored")  # fmt: skip
        self._set_update("set_updater", UpdaterCall(updater))

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushed gradients from now on, with error feedback; residuals are empty.

        In distributed stores that is what a worker sends, after the arrays of its devices are added. In ``device``, it
        is the array of each device.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``, or with the type ``1bit``.

        Raises:
            InvalidInput: other parameters, or the type of the store is ``local``.
        """
        if not (self._kind.distributed or self._kind.on_device):
            raise InvalidInput("type", self.type, "nothing is sent that could be compressed", "leave it out")
        compressor_of(compression_params)
        self._compression = dict(compression_params)
        for client in self._values:
            client.forget_residuals()

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the state of all optimizers to a file, on the worker that calls this. An existing file is replaced.

        The file is safetensors, and can be loaded on any number of workers.

        Args:
            dump_optimizer: write the hyperparameters, such as the learning rate, too.

        Raises:
            UnisonoError: there is no optimizer.
            CheckpointError: the file cannot be written.
        """
        self._check_optimizer("save")
        optimizer_states.save(Path(fname), self._values.optimizer_states(dump_optimizer))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Collective, after `init` and `set_optimizer`: load what `save_optimizer_states` wrote; worker 0 reads it.

        Raises:
            UnisonoError: there is no optimizer.
            CheckpointError: there is no such file, it is damaged, or it has other keys or shapes.
        """
        self._check_optimizer("load")
        _agree(self._comm, "load_optimizer_states")
        cause, problem = None, ""
        if self.rank == 0:
            try:
                self._values.load_optimizer_states(optimizer_states.load(Path(fname)), os.fspath(fname))
            except UnisonoError as error:
                cause, problem = error, str(error)
        if problem := broadcast_text(self._comm, problem):
            raise CheckpointError(problem) from cause

    def barrier(self) -> None:
        """Collective: wait for all workers. In ``dist_async``, all pushes before it are then applied.

        Raises:
            MessageMismatch: another worker calls another collective method.
        """
        if not self._kind.synchronous:
            for client in self._values:
                client.finish_push()
        _agree(self._comm, "barrier")

    def close(self) -> None:
        """Collective: wait until no worker needs the values that this one stores, and end the store.

        It does not wait if an exception is on its way. Leaves the run if `create` joined it. May be called twice.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if sys.exc_info()[0] is None:
                self.barrier()
        finally:
            for connection in self._connections:
                connection.close()
            self._leave()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _set_update(self, method: str, update: Update) -> None:
        self._check_steps_parts(update)
        _agree(self._comm, method)
        self._server.update = update
        _agree(self._comm, f"end of {method}")

    def _check_steps_parts(self, update: Update) -> None:
        divided = self._values.divided
        if isinstance(update, OptimizerStep) and not update.elementwise and divided is not None:
            raise InvalidInput("optimizer", update.kind.__name__, f"the value of key {divided!r} is divided among the "
                               "workers, and this optimizer may need it whole", "create the store with a larger "
                               "bigarray_bound, or use an elementwise optimizer of torch")  # fmt: skip

    def _check_optimizer(self, verb: str) -> None:
        if not isinstance(self._server.update, OptimizerStep):
            raise UnisonoError(f"there is no optimizer whose state to {verb}: call set_optimizer on all workers first")


def _agree(comm: Communicator, *lines: str) -> None:
    """Collective: raises `MessageMismatch` unless all workers pass the same `lines`."""
    texts = [json.loads(text) for text in gather_text(comm, json.dumps(lines))]
    for rank, other in enumerate(texts):
        for first, second in zip_longest(texts[0], other, fillvalue="nothing more"):
            if first != second:
                raise MessageMismatch(f"worker 0: {first}; worker {rank}: {second}")


def _row_ids(key: Keys, outs: Mapping[Key, list[Array]], row_ids: Any) -> dict[Key, list[Array]]:
    """The row numbers for each array of each key."""
    if isinstance(row_ids, list | tuple) and len(row_ids) == 1 and isinstance(row_ids[0], np.ndarray | Tensor):
        row_ids = row_ids[0]
    if isinstance(row_ids, np.ndarray | Tensor):
        return {name: [row_ids] * len(arrays) for name, arrays in outs.items()}
    found = grouped(key, row_ids, "row_ids")
    for name, arrays in outs.items():
        if len(found[name]) != len(arrays):
            raise InvalidInput("row_ids", len(found[name]), f"key {name!r} has {len(arrays)} arrays",
                               "pass one array for each, or one for all")  # fmt: skip
    return found
