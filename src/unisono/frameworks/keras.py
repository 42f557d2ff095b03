"""Keras' ``model.fit`` on many workers, by a callback. Keras runs on its torch backend.

Keras' optimizers are its own, and take the gradients that ``backward()`` leaves in ``grad``. So each worker computes
the optimizer's step from the mean gradient, and all have the same weights and optimizer variables. What callbacks do
between two steps stays alike where workers see the same logs. Two things make sure of it:

    a step or an epoch begins, an epoch or training ends ──► all workers say which of these it is
    a step, an epoch or a validation has ended ────────────► its logs become those of the data of all workers

An epoch's metrics are computed from the sums of their variables over all workers, as if one process had seen all data.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unisono.comm.text import gather_text
from unisono.compress import Cast, Compressor
from unisono.config import checked
from unisono.ddp import default_world
from unisono.errors import InvalidInput, UnisonoError
from unisono.sync import AllReduce, Synchronizer
from unisono.world import World

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ImportError("unisono.frameworks.keras needs Keras: pip install keras") from None

_STEP, _EPOCH, _EPOCH_END, _END = range(4)
_POINTS = ("begins step {batch} of epoch {epoch}", "begins epoch {epoch}", "has ended epoch {epoch}", "ends training")

_WRITERS = (
    (keras.callbacks.ModelCheckpoint, "filepath"),
    (keras.callbacks.BackupAndRestore, "backup_dir"),
    (keras.callbacks.CSVLogger, "filename"),
    (keras.callbacks.TensorBoard, "log_dir"),
)

_BOUND: WeakKeyDictionary[World, list[KerasWeights]] = WeakKeyDictionary()


class Distributed(keras.callbacks.Callback):
    """The first callback of ``model.fit``: from the first epoch on, gradients are averaged over all workers.

    All workers begin with the variables of worker 0's model and optimizer. Moving statistics, such as those of
    ``BatchNormalization``, are averaged in each step. Random layers draw other numbers on each worker.

    Logs are those of the data of all workers: exactly at the end of an epoch, and during it as the mean of the workers'
    running values. Callbacks after this one see them, so that all workers stop, or change the learning rate, alike.
    Workers other than worker 0 print nothing.

    Each worker is given its own part of the data, and all of them equally many steps; see `shard`. A callback that
    writes files is for worker 0 alone.

    Args:
        world: from `unisono.join`; None: the one of this process.
        sync: `AllReduce`, as in `Config`.
        compress: as in `Config`.

    Raises:
        InvalidInput: Keras' backend is not torch, or an argument is not one that `Config` takes, or not supported.
    """

    def __init__(
        self,
        world: World | None = None,
        *,
        sync: Synchronizer | str = AllReduce(),
        compress: Compressor | str = Cast(),
    ) -> None:
        super().__init__()
        if keras.backend.backend() != "torch":
            raise InvalidInput("KERAS_BACKEND", keras.backend.backend(), "its gradients are not torch's",
                               "set KERAS_BACKEND=torch before keras is imported")  # fmt: skip
        self._options = checked(sync=sync, compress=compress)
        if not isinstance(self._options["sync"], AllReduce):
            raise InvalidInput(
                "sync", type(self._options["sync"]).__name__, "its exchange is part of the steps of a torch optimizer",
                "use AllReduce(), or make a unisono.Task of the Keras model")  # fmt: skip
        self.world = world or default_world()
        self._begun = self._in_epoch = False
        self._hook: Any = None

    # ---- called by Keras ----

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the callbacks. What they load is shared later, when the first epoch begins."""
        self._begun = self._in_epoch = False
        self._epoch, self._thread = 0, threading.get_ident()
        self._check_callbacks(_list_of(self))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Collective."""
        if not self._begun:
            self._begin()
        self._in_epoch, self._epoch = True, epoch
        self._step_logs: dict[str, Any] = {}
        self._train_logs: dict[str, Any] | None = None
        self._validation_logs: dict[str, Any] = {}
        self._meet(_EPOCH, rate=_learning_rate(self.model.optimizer))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Collective."""
        self._meet(_STEP, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective: `logs` become the mean over all workers."""
        if threading.get_ident() != self._thread:
            raise InvalidInput("callbacks", "Distributed", "outside of a list Keras calls a callback in another "
                               "thread", "write callbacks=[Distributed(...)]")  # fmt: skip
        logs.update(self._mean(logs))
        self._step_logs = dict(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Collective in `fit`: the metrics of training are read before those of validation take their place."""
        if self._in_epoch:
            self._end_data()

    def on_test_end(self, logs: Any = None) -> None:
        """Collective in `fit`."""
        if self._in_epoch:
            self._validation_logs = self._total(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Collective: `logs` become those of the data of all workers."""
        self._end_data()
        self._in_epoch = False
        logs.update(self._train_logs or {})
        logs.update({f"val_{name}": value for name, value in self._validation_logs.items()})

    def on_train_end(self, logs: Any = None) -> None:
        """Collective: counters and random numbers are alike on all workers again."""
        if self._begun:
            self._begun = False
            self._hook.remove()
            self._meet(_END)
            self.world.share(KerasVariables(v for v in self.model.variables if not _is_real(v)))
            _share_generators(self.world)

    # ---- before the first epoch ----

    def _check_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Collective."""
        if callbacks[0] is not self:
            raise InvalidInput("callbacks", type(callbacks[0]).__name__, "it comes before Distributed, and would see "
                               "logs of this worker's data alone", "put Distributed first")  # fmt: skip
        if self.world.rank:
            for each in callbacks:
                if hasattr(each, "verbose"):
                    each.verbose = 0
        files = {
            str(getattr(each, name)): type(each).__name__
            for each in callbacks
            for kind, name in _WRITERS
            if isinstance(each, kind)
        }
        owners: dict[str, int] = {}
        for rank, text in enumerate(gather_text(self.world.comm, json.dumps(files))):
            for path, kind in json.loads(text).items():
                if path in owners:
                    raise InvalidInput(
                        kind, path, f"workers {owners[path]} and {rank} would write it at the same time",
                        "give this callback to worker 0 alone, or put world.rank into the path")  # fmt: skip
                owners[path] = rank

    def _begin(self) -> None:
        """Collective: all workers get what worker 0 has, and train together from now on."""
        model, optimizer = self.model, self.model.optimizer
        for variable in model.trainable_variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise InvalidInput("model", variable.path, "its gradient is its new value, for which a mean is wrong",
                                   "train in mixed_float16 or mixed_bfloat16")  # fmt: skip
        if model.jit_compile:
            raise InvalidInput("jit_compile", True, "the exchange of gradients would be compiled with the step",
                               "write compile(jit_compile=False)")  # fmt: skip
        replicas = _BOUND.setdefault(self.world, [])
        known = {id(each) for replica in replicas for each in (*replica.parameters(), *replica.inner)}
        inner = [each.module for each in model._flatten_layers() if isinstance(each, keras.layers.TorchModuleWrapper)]
        new = KerasWeights(
            [variable for variable in model.weights if _is_real(variable) and id(variable.value) not in known],
            [module for module in inner if id(module) not in known],
        )
        self.world.share(KerasVariables([*model.variables, *optimizer.variables]))
        if any(True for _ in new.parameters()):
            self.world.bind(new, **self._options)
            replicas.append(new)
        self._compare_fits()
        _draw_apart([v for v in model.variables if v.name == "seed_generator_state"], self.world)
        if self._hook is not None:
            self._hook.remove()  # of a fit that has failed
        self._hook = model.register_forward_pre_hook(_Forward(replicas), with_kwargs=True)
        self._begun = True

    def _compare_fits(self) -> None:
        """Collective.

        Raises:
            InvalidInput: workers have unequal numbers of steps or epochs, or another optimizer.
        """
        config = self.model.optimizer.get_config()
        mine = {
            "the number of steps in an epoch": self.params["steps"],
            "the number of epochs": self.params["epochs"],
            **{f"the optimizer's {name}": value for name, value in config.items() if name != "name"},
        }
        texts = gather_text(self.world.comm, json.dumps(mine, default=lambda value: type(value).__name__))
        first, *others = map(json.loads, texts)
        for rank, other in enumerate(others, 1):
            for name in [name for name in {**first, **other} if first.get(name) != other.get(name)]:
                raise InvalidInput(
                    "fit", name, f"{first.get(name)} on worker 0, and {other.get(name)} on worker {rank}",
                    "compile and fit alike on all workers, with equally many samples each; see shard")  # fmt: skip

    # ---- in step with each other ----

    def _meet(self, point: int, batch: int = 0, rate: float = 0.0) -> None:
        """Collective: all workers are at the same point. A worker that went another way would be waited for in vain."""
        mine = torch.tensor([point, self._epoch + 1, batch + 1, rate], dtype=torch.float64)
        rows = self.world.comm.gather(mine).wait()
        for rank, row in enumerate(rows.tolist()):
            first = rows[0].tolist()
            if row[:3] != first[:3]:
                places = [
                    _POINTS[int(at)].format(epoch=int(epoch), batch=int(step)) for at, epoch, step, _ in (first, row)
                ]
                raise UnisonoError(
                    f"worker 0 {places[0]}, and worker {rank} {places[1]}: give all workers equally many steps and the "
                    "same initial epoch, and let a callback stop all of them alike"
                )
            if row[3] != first[3]:
                raise UnisonoError(
                    f"the learning rate is {first[3]:g} on worker 0, and {row[3]:g} on worker {rank}: change it on all "
                    "workers alike, for example by the logs, which are equal on all of them"
                )

    def _end_data(self) -> None:
        """Collective: the steps of the epoch are taken. Does nothing the second time."""
        if self._train_logs is None:
            self._meet(_EPOCH_END)
            self._train_logs = self._total(self._step_logs)

    def _mean(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Collective: the mean of each value in `logs`."""
        columns = self._gather([torch.as_tensor(value) for value in logs.values()])
        return {name: _plain(rows.mean(0)) for name, rows in zip(logs, columns)}

    def _total(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Collective: what Keras has logged as `logs`, of the data of all workers."""
        results = self._results()
        # Other names are those of a train_step of the user's, whose values are no results of metrics.
        return results if results.keys() == logs.keys() else self._mean(logs)

    def _results(self) -> dict[str, Any]:
        """Collective: the results of the model's metrics over the data of all workers."""
        variables = list({id(v): v for metric in self.model.metrics for v in metric.variables}.values())
        own = [variable.value.detach().clone() for variable in variables]
        for variable, rows in zip(variables, self._gather(own)):
            variable.assign(_combined(variable.aggregation, rows))
        results = dict(_flat(self.model.get_metrics_result()))
        for variable, value in zip(variables, own):
            variable.assign(value)
        return results

    def _gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Collective: for each of `tensors`, those of all workers by rank, as float64."""
        flat = [tensor.cpu().double().reshape(-1) for tensor in tensors]
        rows = self.world.comm.gather(torch.cat([torch.zeros(0, dtype=torch.float64), *flat])).wait()
        columns = rows.split([each.numel() for each in flat], dim=1)
        return [column.view(-1, *tensor.shape) for column, tensor in zip(columns, tensors)]


def shard(data: Any, world: World | None = None) -> Any:
    """This worker's part of `data`: rows ``rank``, ``rank + size`` and so on, equally many on each worker.

    So the batches of `b` rows of all workers are together those of ``b * size`` rows of one worker, unless `fit`
    shuffles them. The last rows are left out where `size` does not divide their number.

    Args:
        data: arrays of numpy, tensors of torch, or tuples, lists and dictionaries of them.
        world: from `unisono.join`; None: the one of this process.

    Raises:
        InvalidInput: there are fewer rows than workers.
    """
    rank, size = (world or default_world()).rank, (world or default_world()).size

    def part(array: Any) -> Any:
        if array is None:
            return None
        rows = len(array) // size * size
        if not rows:
            raise InvalidInput("data", f"{len(array)} rows", f"fewer than the {size} workers", "start fewer workers")
        return array[rank:rows:size]

    return keras.tree.map_structure(part, data)


class KerasVariables(nn.Module):
    """Variables of Keras as parameters of a torch module, named by their paths."""

    def __init__(self, variables: Iterable[Any]) -> None:
        super().__init__()
        for variable in {id(v): v for v in variables}.values():
            path = variable.path.replace(".", "_")
            count = sum(name == path or name.startswith(f"{path} (") for name in self._parameters)
            self.register_parameter(f"{path} ({count})" if count else path, variable.value)


class KerasWeights(KerasVariables):
    """What is bound for a model: its weights that are not integers, and its modules of torch."""

    def __init__(self, variables: Iterable[Any], modules: Iterable[nn.Module]) -> None:
        super().__init__(variables)
        self.inner = nn.ModuleList(modules)

    def forward(self, *inputs: Any, **named: Any) -> None:
        """Nothing: called for the hooks that `World.bind` puts on a model."""


class _Forward:
    """Before a forward pass of a Keras model in training: that of its replicas."""

    def __init__(self, replicas: Sequence[KerasWeights]) -> None:
        self._replicas = replicas

    def __call__(self, model: nn.Module, inputs: Any, named: Any) -> None:
        if model.training and torch.is_grad_enabled():
            for replica in self._replicas:
                replica(*inputs, **named)


def _list_of(callback: Distributed) -> Sequence[Any]:
    """The callbacks of the `fit` that has called `callback`: Keras tells a callback nothing of the others."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            callbacks: Sequence[Any] = caller.callbacks
            return callbacks
        frame = frame.f_back
    return [callback]


def _is_real(variable: Any) -> bool:
    """Whether workers have the mean of a variable that a step writes. An integer is counted by each worker itself."""
    return bool(variable.value.is_floating_point())


def _draw_apart(seeds: Iterable[Any], world: World) -> None:
    """Let random layers draw other numbers on each worker."""
    apart = world.rank * (2**32 // world.size)  # Keras adds the counter to the seed, so seeds are far apart
    for variable in seeds:
        seed, counter = variable.value.tolist()
        variable.assign(torch.tensor([(seed + apart + 2**31) % 2**32 - 2**31, counter], dtype=variable.value.dtype))
    if world.rank:  # layers without a seed draw from torch's own generators
        torch.manual_seed(int(torch.randint(2**62, ())) + world.rank)


def _share_generators(world: World) -> None:
    """Collective: torch's own generators have the state that they have on worker 0."""
    torch.set_rng_state(world.comm.broadcast(torch.get_rng_state()).wait())
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(world.comm.broadcast(torch.cuda.get_rng_state()).wait())


def _learning_rate(optimizer: Any) -> float:
    """Of the optimizer, or the sum of those of several."""
    rates = [each.learning_rate for each in getattr(optimizer, "optimizers", [optimizer])]
    return float(sum(_plain(rate) for rate in rates))


def _combined(way: str | None, rows: Tensor) -> Tensor:
    """A variable's values on all workers as one, by Keras' name for the way; by default those of metrics are sums."""
    return rows.sum(0) if way == "sum" else rows.mean(0) if way == "mean" else rows[0]


def _flat(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`logs` as Keras hands them to callbacks: without dictionaries in them."""
    for name, value in logs.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, _plain(value)


def _plain(value: Any) -> Any:
    """A number of Python, or an array of numpy."""
    array = keras.ops.convert_to_numpy(value)
    return array if array.ndim else float(array)
