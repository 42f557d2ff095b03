"""A Keras 3 model, on its torch backend, learns to read handwritten digits; `network` is plain Keras.

    unisono train examples/keras_model.py:digits
    unisono train examples/keras_model.py:digits --workers 2 --compress 'Exact()'
    unisono train examples/keras_model.py:digits --workers 2 --layout 'Layout(shard=2)'

Keras looks its weights up in variables of its own, and is told by an argument whether it is being trained. `Bridge`
gives it both as torch has them, so that weights may lie in parts on several workers. Initial weights and dropout
follow Unisono's seed; give layers no seed of their own. Layouts do not see the inside of a Keras model: `tensor` leaves
it whole, and the log says so; `pipeline` and `context` refuse it.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

from functools import partial

import keras
import torch
from keras import layers
from torch import Tensor, nn
from torch.nn import functional as F

from unisono import Cosine, Evaluation, Task
from unisono.tasks.builtin.digits import images


def network(width: int, dropout: float) -> keras.Model:
    keras.utils.clear_session()  # layers are numbered from the start, so that weights have the same names every time
    return keras.Sequential([
        layers.Input((1, 8, 8)),
        layers.Permute((2, 3, 1)),  # Keras has channels last
        layers.Conv2D(width, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU(),
        layers.Conv2D(2 * width, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU(),
        layers.MaxPooling2D(2), layers.Flatten(), layers.Dropout(dropout), layers.Dense(10),
    ])  # fmt: skip


class Bridge(nn.Module):
    """A Keras model that is built: trained variables are parameters here, all others buffers."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.called = model.stateless_call
        for variable in model.trainable_variables:
            self.register_parameter(variable.path, nn.Parameter(variable.value.detach()))
        for variable in model.non_trainable_variables:
            self.register_buffer(variable.path, variable.value.detach())

    def forward(self, x: Tensor) -> Tensor:
        output, changed = self.called(list(self.parameters()), list(self.buffers()), x, training=self.training)
        if self.training:
            for buffer, value in zip(self.buffers(), changed):
                buffer.copy_(value)
        return output


def digits(*, width: int = 16, dropout: float = 0.1) -> Task:
    return Task(
        name="keras",
        model=lambda: Bridge(network(width, dropout)),
        data=partial(images, held_out=False),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        evaluate=Evaluation(
            partial(images, held_out=True), {"accuracy": lambda output, batch: output.argmax(1) == batch[1]}
        ),
        schedule=Cosine(warmup=20),
        defaults={"steps": 240, "global_batch": 64, "micro_batch": 16},
    )
