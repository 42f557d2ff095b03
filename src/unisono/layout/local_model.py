"""One worker's part of a replica: plain tensors under global names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.tensors.box import Box

Loss = Callable[[Any, Any], Tensor]
MicroBatchContext = Callable[[Any, Loss], AbstractContextManager[tuple[Any, Loss]]]


def _whole_batch(batch: Any, loss: Loss) -> AbstractContextManager[tuple[Any, Loss]]:
    return nullcontext((batch, loss))


class Unsharding(Protocol):
    """Controls when a model's parameters are unsharded on this rank, and when their gradients are summed over ranks.

    Attributes:
        late: names of parameters whose gradients are summed over ranks only in `finish`.
    """

    late: frozenset[str]

    def connect(self, loss: Tensor) -> Tensor:
        """`loss`, connected to all parameters, so that backward reaches those that the forward pass did not use."""
        ...

    def backward(self, last: bool) -> None:
        """Prepare for a backward pass. Gradients may stay unsharded until this worker's `last` backward pass of a step,
        which sums them over ranks."""
        ...

    def used(self, name: str) -> bool:
        """Whether this rank's own backward passes gave the parameter `name` a gradient since the last `finish`. If not,
        its gradient is the sum of other ranks' gradients, or zero where none of them used it."""
        ...

    def finish(self) -> frozenset[str]:
        """Collective over the ranks that shard the same parameters, after the last backward pass of a step: sum the
        gradients of `late` over ranks, and return the names of the parameters that no rank used."""
        ...

    def reshard(self) -> None:
        """Between two steps: free the unsharded parameters, so that the next forward pass reads the updated shards."""
        ...


class Stepping(Protocol):
    """Which rank steps which parameters, for optimizers that need whole tensors where ranks hold shards."""

    @property
    def parts(self) -> Mapping[str, Box]:
        """For each parameter that this rank steps, the box of the whole tensor that its optimizer sees."""
        ...

    def step(self, step: Callable[[], Any]) -> Any:
        """Collective: take the optimizer's `step` with the gradients of this rank's shards. Raises `PeerLost`, and then
        leaves parameters and optimizer unchanged."""
        ...


class NoUnsharding:
    """An `Unsharding` of a model without sharded parameters."""

    late: frozenset[str] = frozenset()

    def connect(self, loss: Tensor) -> Tensor:
        return loss

    def used(self, name: str) -> bool:
        return True

    def finish(self) -> frozenset[str]:
        return frozenset()

    def backward(self, last: bool) -> None:
        """See `Unsharding`."""

    def reshard(self) -> None:
        """See `Unsharding`."""


@dataclass(frozen=True)
class LocalModel:
    """One worker's part of a model.

    Attributes:
        model: the module to call.
        local: a module with this worker's parts of the parameters, as plain parameters, and the buffers, under the
            names of the whole model. Optimizer, synchronizer and checkpoint see nothing else. These parameters share
            memory with the tensors that `model` computes with.
        leaves: for each parameter of `local`, by name, the tensor whose ``.grad`` autograd fills.
        parts: for each parameter of `local`, by name, its box of the whole tensor.
        counted_elsewhere: names of parameters whose part another worker of the replica has too, and counts in norms.
        micro_batch_part: ``with micro_batch_part(batch, loss) as (part, part_loss)``: what this worker computes of a
            micro-batch and of the task's loss.
        pipeline: runs this worker's stages, where layers are split over workers. Gradients then stay in the leaves
            until all micro-batches are computed.
        unsharding: is called before backward passes, and at the end of a step and of an evaluation.
        stepping: which rank steps which parameters. None: each worker steps its own parts.
        sparse: names of embedding weights whose optimizer gets sparse gradients.
    """

    model: nn.Module
    local: nn.Module
    leaves: Mapping[str, nn.Parameter]
    parts: Mapping[str, Box]
    counted_elsewhere: frozenset[str] = frozenset()
    micro_batch_part: MicroBatchContext = _whole_batch
    pipeline: Any = None
    unsharding: Unsharding = NoUnsharding()
    stepping: Stepping | None = None
    sparse: frozenset[str] = frozenset()

    @property
    def stepped(self) -> Mapping[str, Box]:
        """For each parameter whose optimizer state is on this worker, the box of the whole tensor that the state
        covers."""
        return self.stepping.parts if self.stepping else self.parts

    def step(self, step: Callable[[], Any]) -> Any:
        """Take the optimizer's `step`; see `Stepping.step`."""
        return self.stepping.step(step) if self.stepping else step()

    @staticmethod
    def whole(model: nn.Module) -> LocalModel:
        """The `LocalModel` of a worker that has all of `model`, unchanged."""
        leaves = dict(model.named_parameters())
        parts = {name: Box.whole(tuple(p.shape)) for name, p in leaves.items()}
        return LocalModel(model, model, leaves, parts, sparse=sparse_parameters(model))

    @staticmethod
    def of(
        model: nn.Module,
        leaves: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        counted_elsewhere: Collection[str] = (),
    ) -> LocalModel:
        """The `LocalModel` of a worker whose `model` has these parameters and buffers, by global name.

        Parameters that are distributed tensors are represented by their local parts.
        """
        parts = {name: _part(leaf) for name, leaf in leaves.items()}
        return LocalModel(model, _local(leaves, buffers), leaves, parts, frozenset(counted_elsewhere))

    def take(self, name: str) -> Tensor | None:
        """Remove and return the local part of the gradient of `name`; None if there is none."""
        leaf = self.leaves[name]
        gradient, leaf.grad = leaf.grad, None
        return None if gradient is None else _local_of(gradient)

    def on_gradient(self, name: str, arrived: Callable[[str, Tensor], None]) -> RemovableHandle:
        """Call ``arrived(name, gradient)`` with each gradient of `name`, which is removed from the leaf."""

        def take(leaf: Tensor) -> None:
            gradient = self.take(name)
            assert gradient is not None
            arrived(name, gradient)

        handle: RemovableHandle = self.leaves[name].register_post_accumulate_grad_hook(take)
        return handle


def _local(leaves: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> nn.Module:
    """A tree of plain modules with the local parts under these names."""
    root = nn.Module()
    for path, leaf in leaves.items():
        home, name = _home(root, path)
        home.register_parameter(name, nn.Parameter(_local_of(leaf.detach()), leaf.requires_grad))
    for path, buffer in buffers.items():
        home, name = _home(root, path)
        home.register_buffer(name, buffer)
    return root


def _home(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that owns `path`, created if missing, and the tensor's name in it."""
    *words, name = path.split(".")
    for word in words:
        if word not in root._modules:
            root.add_module(word, nn.Module())
        root = root.get_submodule(word)
    return root, name


def _is_distributed(x: Any) -> bool:
    """Whether `x` is a DTensor, whose module takes a second to import and is often not needed."""
    return hasattr(x, "to_local")


def _local_of(x: Any) -> Tensor:
    local: Tensor = x.to_local() if _is_distributed(x) else x
    return local


def _part(leaf: Any) -> Box:
    if not _is_distributed(leaf):
        return Box.whole(tuple(leaf.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(leaf.shape, leaf.device_mesh, leaf.placements)
    # The offset of an empty part is arbitrary in torch.
    return Box(tuple(leaf.shape), tuple(map(min, offset, leaf.shape)), tuple(size))


def sparse_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the weights of embeddings that ask for sparse gradients."""
    return frozenset(f"{path}.weight".lstrip(".") for path, _ in _sparse(model))


def dense(model: nn.Module) -> frozenset[str]:
    """Make embeddings give dense gradients, which can be summed in parts; returns the former `sparse_parameters`."""
    found = sparse_parameters(model)
    for _, module in _sparse(model):
        module.sparse = False
    return found


def _sparse(model: nn.Module) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    kinds = nn.Embedding | nn.EmbeddingBag
    return [(path, m) for path, m in model.named_modules() if isinstance(m, kinds) and m.sparse]


class WholeTensors(Mapping[str, Tensor]):
    """Parameters and buffers of `model` by global name, gathered one at a time.

    Collective: where tensors are sharded, all ranks with a shard must read the same names in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def __getitem__(self, name: str) -> Tensor:
        found: Any = self._found[name]
        whole: Tensor = found.full_tensor() if _is_distributed(found) else found
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
