"""Hugging Face Transformers: a `Trainer` whose workers exchange their gradients by Unisono.

from unisono.frameworks.transformers import Trainer    # instead of transformers'
"""

from __future__ import annotations

from typing import Any

import transformers

from unisono.compress import Cast, Compressor
from unisono.frameworks.accelerate import Accelerator
from unisono.sync import AllReduce, Synchronizer


class TrainerMixin:
    """For a class of your own or of another library: ``class OwnTrainer(TrainerMixin, SomeTrainer)``.

    Args:
        sync, compress: as in `Config`.
        arguments, named: as of the other class.
    """

    accelerator: Any

    def __init__(
        self,
        *arguments: Any,
        sync: Synchronizer | str = AllReduce(),
        compress: Compressor | str = Cast(),
        **named: Any,
    ) -> None:
        self._exchange = sync, compress
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers'."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # transformers makes its own class, and keeps methods of the object.
        self.accelerator = Accelerator.adopt(self.accelerator, *self._exchange)


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' class, with another exchange of gradients: arguments of `TrainerMixin` and of that class."""
