"""The blocks that repeat in a model: found by structure, gathered, computed again and compiled one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from unisono.errors import InvalidInput
from unisono.layout.compile_cache import compiled


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost members of the model's lists and sequences that have parameters: what repeats."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in blocks(child)]


def as_it_is(model: nn.Module) -> nn.Module:
    """Change nothing."""
    return model


@dataclass(frozen=True)
class BlockOptions:
    """How a model computes, block by block; see `Config` for the first three.

    Args:
        whole: somebody compiles the model as a whole.
        change: what is to be done to the model, or to each stage of a pipeline, once it is split and not yet sharded;
            may replace modules by others with the same parameters.
    """

    precision: str = "fp32"
    activation_checkpointing: str = "none"
    compile: bool = False
    whole: bool = False
    change: Callable[[nn.Module], nn.Module] = as_it_is

    @property
    def changes_backward(self) -> bool:
        """Whether the backward pass of a block is more than autograd's over its own operations."""
        return self.activation_checkpointing != "none" or self.compile

    def check(self, model: nn.Module) -> None:
        """Raise `InvalidInput` if `model` has no blocks, and something is to be done with them."""
        if blocks(model):
            return
        problem, cure = f"{type(model).__name__} has no list or sequence of blocks", "keep its layers in a ModuleList"
        if self.activation_checkpointing != "none":
            raise InvalidInput("activation_checkpointing", self.activation_checkpointing,
                               f"{problem}, and one that is computed again as a whole saves nothing",
                               f"leave it out, or {cure}")  # fmt: skip
        if self.compile and not self.whole:
            raise InvalidInput("compile", True, f"{problem}, and here they are compiled one by one",
                               f"leave it out, or {cure}")  # fmt: skip

    def prepare(self, block: nn.Module) -> None:
        """Change what `block` does when it is called, in place."""
        if self.compile and not self.whole:
            block.forward = compiled(block.forward)
        if self.activation_checkpointing != "none":
            from unisono.layout.activation_checkpoint import checkpoint_block  # imports more of torch than others need

            checkpoint_block(block, self.activation_checkpointing)
