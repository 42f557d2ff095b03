"""Batch normalization over several workers equals that over all their samples."""

import pytest
import torch
from torch import nn

from unisono.comm import simulate
from unisono.errors import UnisonoError
from unisono.trainer.sync_batchnorm import SyncBatchNorm, synchronize_batchnorm

SHARE, FEATURES = 4, 3
SHAPES = {"1d": (FEATURES,), "sequence": (FEATURES, 5), "2d": (FEATURES, 3, 2)}
LAYERS = {"1d": nn.BatchNorm1d, "sequence": nn.BatchNorm1d, "2d": nn.BatchNorm2d}


def data(size: int, shape: tuple[int, ...], scale: float = 1.0, offset: float = 0.0) -> tuple[torch.Tensor, ...]:
    """The input of all workers and the gradient that comes back."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(size * SHARE, *shape, generator=random, dtype=torch.float64) * scale + offset
    return x, torch.randn(x.shape, generator=random, dtype=torch.float64)


def layer(kind: str, **options) -> nn.Module:
    torch.manual_seed(1)
    norm = LAYERS[kind](FEATURES, **options)
    if norm.affine:
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.bias)
    return norm


def passed(norm: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two forward and backward passes: all that comes out."""
    found = {}
    for turn in range(2):
        x = x.detach().requires_grad_()
        output = norm(x + turn)
        output.backward(gradient)
        found |= {f"output {turn}": output.detach(), f"of input {turn}": x.grad}
    found |= {f"of {name}": p.grad for name, p in norm.named_parameters()}
    return found | {name: b.clone() for name, b in norm.named_buffers()}


def part(comm, kind: str, x: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype, options) -> dict:
    norm = synchronize_batchnorm(layer(kind, **options), comm)
    if dtype == torch.float64:
        norm = norm.double()
    rows = slice(comm.rank * SHARE, (comm.rank + 1) * SHARE)
    return passed(norm, x[rows].to(dtype), gradient[rows].to(dtype))


def check(size, kind, options, dtype, rtol, atol, **given) -> None:
    x, gradient = data(size, SHAPES[kind], **given)
    expected = passed(layer(kind, **options).double(), x.to(dtype).double(), gradient.to(dtype).double())
    parts = simulate(size, part, kind, x, gradient, dtype, options)
    for key, value in expected.items():
        pieces = [p[key] for p in parts]
        if "put" in key:
            whole = torch.cat(pieces)
            assert whole.dtype == dtype
        elif key.startswith("of "):
            whole = sum(pieces)  # each worker's share, which all-reduce adds up
        else:
            whole = pieces[0]
            assert all(torch.equal(whole, piece) for piece in pieces), key
        torch.testing.assert_close(
            whole.double(), value.double(), rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_it_equals_batch_normalisation_of_the_whole(size, kind, options) -> None:
    check(size, kind, options, torch.float32, 1e-5, 1e-5)


def test_double_precision_is_kept() -> None:
    check(2, "2d", {}, torch.float64, 1e-11, 1e-11)


def test_half_precision_is_normalised_in_single() -> None:
    check(2, "2d", {}, torch.bfloat16, 2**-7, 2**-5)


def test_a_mean_that_is_large_beside_the_deviations_does_not_cancel() -> None:
    check(3, "2d", {}, torch.float32, 2e-4, 2e-3, scale=1e-2, offset=1e4)


def test_every_layer_is_replaced_also_where_it_is_used_twice_and_keeps_its_tensors() -> None:
    shared = nn.BatchNorm1d(3, momentum=0.2).eval()
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.Linear(3, 3)), "b": shared, "c": nn.BatchNorm2d(2)})
    tensors = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}

    def run(comm) -> None:
        synchronize_batchnorm(model, comm)

    simulate(1, run)
    assert model["a"][0] is model["b"]
    assert isinstance(model["b"], SyncBatchNorm)
    assert isinstance(model["c"], SyncBatchNorm)
    assert (model["b"].momentum, model["b"].training) == (0.2, False)
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == tensors


def _other_layers(comm) -> str:
    """The second worker leaves out the first layer."""
    model = synchronize_batchnorm(nn.Sequential(*(nn.BatchNorm1d(FEATURES) for _ in range(3))), comm)
    with pytest.raises(UnisonoError) as caught:
        model[comm.rank :](torch.randn(SHARE, FEATURES))
    return str(caught.value)


def test_workers_that_call_other_layers_are_told_so() -> None:
    for said in simulate(2, _other_layers):
        assert said.startswith("sync_batchnorm: worker 0 calls 0 while worker 1 calls 1; let all workers call the same")
