"""Hugging Face Accelerate: an `Accelerator` whose models exchange their gradients by Unisono.

    from unisono.frameworks.accelerate import Accelerator    # instead of accelerate's

Everything else is Accelerate's: data loaders, devices, mixed precision, and what it gathers over torch's process group.
"""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from unisono.compress import Cast, Compressor
from unisono.ddp import DistributedDataParallel
from unisono.errors import InvalidInput
from unisono.sync import AllReduce, Synchronizer

_WRAPPED = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """accelerate's class, with another exchange of gradients.

    Args:
        sync, compress: as in `Config`. Other synchronizers than `AllReduce` need the model and its optimizer in one
            call of `prepare`.
        arguments, named: as of accelerate's class.

    Raises:
        InvalidInput: accelerate is configured to divide the model itself.
    """

    def __init__(
        self,
        *arguments: Any,
        sync: Synchronizer | str = AllReduce(),
        compress: Compressor | str = Cast(),
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._exchange_by(sync, compress)

    @classmethod
    def adopt(
        cls, existing: accelerate.Accelerator, sync: Synchronizer | str, compress: Compressor | str
    ) -> Accelerator:
        """`existing` as an object of this class, where another library has made it. Raises the errors of the class."""
        existing.__class__ = cls
        assert isinstance(existing, cls)
        existing._exchange_by(sync, compress)
        return existing

    def _exchange_by(self, sync: Synchronizer | str, compress: Compressor | str) -> None:
        kind = self.distributed_type
        if kind not in (*_WRAPPED, DistributedType.NO):
            raise InvalidInput("distributed_type", kind.value, "there Accelerate divides the model itself",
                               "configure it for data parallelism, or use unisono.train with a Layout")  # fmt: skip
        self._exchange: dict[str, Any] = {"sync": sync, "compress": compress}

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As accelerate's; in place of torch's class, the model is wrapped in `DistributedDataParallel`."""
        wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or self.distributed_type not in _WRAPPED
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode or not wrapped)
        if evaluation_mode or wrapped:
            return prepared
        if not any(p.requires_grad for p in prepared.parameters()):
            return prepared
        handler = self.ddp_handler
        replica = DistributedDataParallel(prepared, **(handler.to_kwargs() if handler else {}), **self._exchange)
        if handler is not None:
            handler.register_comm_hook(replica)
        replica.__dict__["_is_accelerate_prepared"] = True
        return replica

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's. Takes a model and its optimizer together, where the synchronizer is not `AllReduce`."""
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        prepared = super().prepare(*objects, device_placement=device_placement)
        every = prepared if isinstance(prepared, tuple) else (prepared,)
        replicas = [each for each in every if isinstance(each, DistributedDataParallel) and each.needs_optimizer]
        if replicas:
            replicas[0].bind(*optimizers)
        return prepared
