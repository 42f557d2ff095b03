"""The repeated blocks of a model: found by structure; sharded, checkpointed and compiled one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from unisono.errors import InvalidInput
from unisono.layout.compile_cache import compiled


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members, with parameters, of the model's outermost ``ModuleList`` and ``Sequential`` modules."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in blocks(child)]


def as_it_is(model: nn.Module) -> nn.Module:
    """Return `model` unchanged."""
    return model


@dataclass(frozen=True)
class BlockOptions:
    """How the blocks of a model compute. The first three fields are the settings of the same names in `Config`.

    Args:
        whole: whether the caller compiles the model as a whole.
        change: applied to the model, or to each stage of a pipeline, after splitting and before sharding. It may
            replace modules by others with the same parameters.
    """

    precision: str = "fp32"
    activation_checkpointing: str = "none"
    compile: bool = False
    whole: bool = False
    change: Callable[[nn.Module], nn.Module] = as_it_is

    @property
    def changes_backward(self) -> bool:
        """Whether a block's backward pass is more than autograd's over its own operations."""
        return self.activation_checkpointing != "none" or self.compile

    def check(self, model: nn.Module) -> None:
        """Raise `InvalidInput` if an option needs blocks and `model` has none."""
        if blocks(model):
            return
        problem, cure = f"{type(model).__name__} has no list or sequence of blocks", "keep its layers in a ModuleList"
        if self.activation_checkpointing != "none":
            raise InvalidInput("activation_checkpointing", self.activation_checkpointing,
                               f"{problem}, and recomputing all of it at once saves no memory",
                               f"omit it, or {cure}")  # fmt: skip
        if self.compile and not self.whole:
            raise InvalidInput("compile", True, f"{problem}, and blocks are compiled one by one",
                               f"omit it, or {cure}")  # fmt: skip

    def prepare(self, block: nn.Module) -> None:
        """Compile and checkpoint `block.forward`, in place, as these options say."""
        if self.compile and not self.whole:
            block.forward = compiled(block.forward)
        if self.activation_checkpointing != "none":
            from unisono.layout.activation_checkpoint import checkpoint_block  # imports more of torch than others need

            checkpoint_block(block, self.activation_checkpointing)
