"""torch's DistributedDataParallel, by its interface: a script of DDP runs after one import is changed.

The class is a subclass of torch's, of which it uses nothing, so that libraries that look for torch's know what it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.compress import Cast, Compressor, PowerSGD
from unisono.config import checked
from unisono.errors import InvalidInput, UnisonoError
from unisono.sync import AllReduce, Synchronizer
from unisono.world import World, join_group

_group = cache(join_group)


@cache
def default_world(sync: Synchronizer = AllReduce(), compress: Compressor = Cast()) -> World:
    """The world of this process for models with these options.

    The first use joins the other workers; all worlds have this group, as torch.distributed has one default process
    group.
    """
    return World(*_group("auto", "auto", 0, 300.0))


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Wraps `module`: each backward pass leaves the mean gradient over all workers in ``grad``.

    Has the interface of torch's class: ``module``, ``no_sync()``, ``join()``, ``register_comm_hook()``, and the keys of
    its ``state_dict()``. Parameters may be unused, in any pass and on any worker. All workers start from the weights
    and buffers of worker 0. Running statistics of normalization layers are folded over all workers, where torch takes
    those of worker 0.

    Args:
        module: to train. It may be moved to its device before.
        device_ids, output_device, dim, process_group: accepted as None or for the device of `module` alone.
        broadcast_buffers: True; buffers are always synchronized.
        init_sync, bucket_cap_mb, find_unused_parameters, check_reduction, gradient_as_bucket_view, static_graph:
            without effect, since what they choose is not needed here.
        world: from `unisono.join`; None: the one of this process.
        sync, compress: as in `Config`. Other synchronizers than `AllReduce` need `bind`.

    Raises:
        InvalidInput: an argument asks for what is not supported.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        world: World | None = None,
        sync: Synchronizer | str = AllReduce(),
        compress: Compressor | str = Cast(),
    ) -> None:
        nn.Module.__init__(self)  # not that of torch's class, which would exchange the gradients once more
        if process_group is not None:
            raise InvalidInput("process_group", process_group, "the workers of a world are all of a run",
                               "leave it out, or pass world=")  # fmt: skip
        if device_ids is not None and len(device_ids) > 1:
            raise InvalidInput("device_ids", device_ids, "a worker has one device", "start one worker per device")
        if not broadcast_buffers:
            raise InvalidInput("broadcast_buffers", False, "buffers are always equal on all workers", "leave it out")
        self.module = module
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.static_graph, self.find_unused_parameters = static_graph, find_unused_parameters
        options = checked(sync=sync, compress=compress)
        self._sync, self._compress, self._begun = options["sync"], options["compress"], False
        self._given = world
        # If torch's class wraps this one, as helpers of libraries do, it finds nothing to average and raises an error.
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_parameters()]
        self.world.share(module)

    @property
    def world(self) -> World:
        """The workers."""
        return self._given or default_world(self._sync, self._compress)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_given": None, "_begun": False}  # a copy is bound by itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)

    def bind(self, *optimizers: Optimizer) -> None:
        """Collective, before the first forward pass: the steps of these `optimizers` are part of the synchronizer's, as
        local steps and parameter servers need it. `AllReduce` needs no call.

        Raises:
            UnisonoError: training has begun.
            InvalidInput: the synchronizer takes one optimizer, or the optimizers do not fit the module.
        """
        if self._begun:
            raise UnisonoError("bind came after the first forward pass: call it before")
        self._begun, world = True, self.world
        world.bind(self.module, *optimizers, sync=self._sync, compress=self._compress)
        weakref.finalize(self, world.release, self.module).atexit = False

    @property
    def needs_optimizer(self) -> bool:
        """Whether the synchronizer needs `bind`."""
        return not (self._begun or isinstance(self._sync, AllReduce))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own."""
        if torch.is_grad_enabled():  # also in evaluation mode, in which a model may be trained
            self._begin()
        return self.module(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `World.no_sync`."""
        self._begin()
        with self.world.no_sync():
            yield

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """See `World.uneven_inputs`.

        Raises:
            InvalidInput: another divisor than the number of workers, or an error when data ends, is asked for.
        """
        if not divide_by_initial_world_size or throw_on_early_termination:
            raise InvalidInput("join", "its arguments", "the mean is over all workers, also those without data",
                               "leave them out")  # fmt: skip
        if not enable:
            return nullcontext()
        self._begin()
        return self.world.uneven_inputs()

    def join_hook(self, **named: Any) -> Any:
        """Raises `InvalidInput`: ``torch.distributed.algorithms.Join`` asks workers in messages of torch's class."""
        raise InvalidInput("Join", type(self).__name__, "not one of its joinables", "write with model.join() instead")

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Compress gradients as torch's `hook` does, one of ``torch.distributed.algorithms.ddp_comm_hooks`` that halves
        or factorizes gradients.

        Raises:
            UnisonoError: training has begun.
            InvalidInput: another hook.
        """
        if self._begun:
            raise UnisonoError("register_comm_hook came after the first forward pass: call it before")
        self._compress = _compressor(state, getattr(hook, "__name__", str(hook)))

    def _begin(self) -> None:
        if not self._begun:
            self.bind()


def _compressor(state: Any, name: str) -> Compressor:
    """The compressor that does what torch's hook of that name does."""
    if name in ("powerSGD_hook", "batched_powerSGD_hook"):
        return PowerSGD(state.matrix_approximation_rank)
    known = {"allreduce_hook": Cast(), "fp16_compress_hook": Cast("fp16"), "bf16_compress_hook": Cast("bf16")}
    if name not in known:
        raise InvalidInput("hook", name, "not one of torch's that have a compressor here",
                           f"use one of {', '.join(known)} or powerSGD_hook, or pass compress=")  # fmt: skip
    return known[name]
