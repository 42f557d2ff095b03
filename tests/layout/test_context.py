"""Laws of context parallelism: a sequence over several workers is computed as on one."""

from __future__ import annotations

import copy
import math
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

from tests.support.corner_models import Experts
from tests.support.layout_models import VOCABULARY
from tests.support.processes import run
from unisono.errors import InvalidInput
from unisono.layout.context import (
    SequenceSplit,
    attending,
    hide_padding,
    loss_share,
    part_loss,
    sequence_length,
    take_part,
    verify,
    with_positions,
)
from unisono.layout.context.attention import FORMS
from unisono.layout.context.group import GroupPeers
from unisono.tasks.builtin.gpt import GPT

CLOSE = 2e-6
SHAPE = GPT(layers=2, width=32, heads=4, context=64)
BOTH = pytest.mark.parametrize("balanced", [True, False])


@contextmanager
def world(place: str, rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(place, size), rank=rank, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


# The split is arithmetic.


@given(size=st.integers(1, 8), chunk=st.integers(1, 5), balanced=st.booleans(), seed=st.integers(0, 99))
def test_parts_are_the_whole_in_other_order(size: int, chunk: int, balanced: bool, seed: int) -> None:
    split = SequenceSplit(2 * size * chunk, size, balanced)
    whole = torch.randn(2, split.length, 3, generator=torch.Generator().manual_seed(seed))
    parts = [split.part(whole, 1, r) for r in range(size)]
    assert all(part.shape == (2, split.local, 3) for part in parts)
    assert all(torch.equal(part, whole[:, split.positions(r)]) for r, part in enumerate(parts))
    assert all(bool((split.positions(r).diff() > 0).all()) for r in range(size))
    assert torch.equal(split.join(parts, 1), whole)


@given(size=st.integers(1, 6), chunk=st.integers(1, 4), balanced=st.booleans())
def test_visible_blocks_are_the_causal_mask(size: int, chunk: int, balanced: bool) -> None:
    split = SequenceSplit(2 * size * chunk, size, balanced)
    for rank in range(size):
        for peer in range(size):
            seen = torch.zeros(split.local, split.local, dtype=torch.bool)
            for (start, end), stop, ends_here in split.visible(rank, peer):
                count = end - start
                block = torch.ones(count, stop, dtype=torch.bool)
                seen[start:end, :stop] |= block.tril(stop - count) if ends_here else block
            assert torch.equal(seen, split.positions(rank)[:, None] >= split.positions(peer)[None])


def test_balanced_workers_have_equally_much_to_see() -> None:
    def seen(split: SequenceSplit) -> set[int]:
        return {int((split.positions(r) + 1).sum()) for r in range(split.size)}

    assert len(seen(SequenceSplit(64, 4))) == 1
    assert len(seen(SequenceSplit(64, 4, balanced=False))) == 4


@pytest.mark.parametrize(
    ("tokens", "size", "balanced", "nearest"),
    [(30, 4, True, 32), (30, 4, False, 32), (13, 2, True, 12), (3, 4, True, 8), (1, 2, False, 2), (33, 2, False, 32)],
)
def test_a_length_that_cannot_be_cut_is_refused(tokens: int, size: int, balanced: bool, nearest: int) -> None:
    with pytest.raises(InvalidInput, match=f"sequence length = {tokens}.*multiple of.*length that works is {nearest}"):
        SequenceSplit(tokens, size, balanced)
    SequenceSplit(nearest, size, balanced)


# What of a batch is cut, and what a part counts for.


def test_take_cuts_what_has_the_sequence() -> None:
    split = SequenceSplit(8, 2)
    tokens, labels, square = torch.arange(24).view(3, 8), torch.arange(3), torch.rand(3, 1, 8, 8)
    features, other = torch.rand(3, 8, 2), torch.rand(3, 5)
    batch = {"x": (tokens, [labels, features]), "mask": square, "other": other, "name": "a"}
    part = take_part(batch, split, 1)
    mine = [2, 3, 4, 5]
    assert torch.equal(part["x"][0], tokens[:, mine])
    assert torch.equal(part["x"][1][1], features[:, mine])
    assert torch.equal(part["mask"], square[:, :, mine])
    assert part["x"][1][0] is labels
    assert part["other"] is other
    assert part["name"] == "a"
    assert sequence_length(batch) == 8
    with pytest.raises(InvalidInput, match="context=1 for data without sequences"):
        sequence_length({"x": labels})


def test_take_keeps_the_kind_of_mapping() -> None:
    tokens = torch.arange(24).view(3, 8)
    batch = BatchEncoding({"input_ids": tokens, "attention_mask": tokens})
    part = take_part(batch, SequenceSplit(8, 2), 1)
    assert torch.equal(part.input_ids, tokens[:, [2, 3, 4, 5]])
    assert isinstance(part, BatchEncoding)
    assert list(part) == list(batch) == ["input_ids", "attention_mask"]
    assert batch.input_ids is tokens


def test_positions_are_given_where_asked_for() -> None:
    split = SequenceSplit(8, 2)
    assert with_positions({"x": torch.zeros(2, 4)}, split, 0)["position_ids"].tolist() == [[0, 1, 6, 7]]
    own = torch.zeros(1, 4)
    assert with_positions({"position_ids": own}, split, 0)["position_ids"] is own


@BOTH
def test_shares_of_counted_tokens_make_a_mean_of_all(balanced: bool) -> None:
    split = SequenceSplit(8, 2, balanced)
    output, target = torch.randn(2, 8, 5, requires_grad=True), torch.randint(0, 5, (2, 8))
    for ignored in ([], [(0, 1), (1, 5)], [(0, 2), (0, 3), (0, 4), (0, 5), (1, 2), (1, 3), (1, 4), (1, 5)]):
        target = target.clone()
        for place in ignored:
            target[place] = -100
        batch = (output.detach(), target)
        shares = [loss_share(_counted, batch, split, r) for r in range(2)]
        parts = [
            part_loss(_cross_entropy, split.part(output, 1, r), take_part(batch, split, r), shares[r]) for r in (0, 1)
        ]
        (got,) = torch.autograd.grad(torch.stack(parts).sum(), output)
        (want,) = torch.autograd.grad(_cross_entropy(output, batch), output)
        assert sum(shares) == pytest.approx(1)
        torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)
    assert shares != [0.5, 0.5]
    assert loss_share(None, batch, split, 0) == loss_share(len, batch, split, 0) == 0.5  # as many samples in each part


def _counted(batch: Any) -> float:
    return float((batch[1] != -100).sum())


def _cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


# Attention, in real processes.

T = 32


def attention_cases() -> dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]]:
    """Name to (batch, heads, heads of keys, width of values) and what attention is called with; masks of all tokens."""
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    steps = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    window = (steps < 3) | (rand(3, 1, T, T) > 0.7)
    keys = rand(3, 1, 1, T) > 0.4
    blind = window.clone()
    blind[1, 0, 5] = False  # a query that sees nothing
    return {
        "all": ((3, 4, 4, 8), {}),
        "causal": ((3, 4, 4, 8), {"is_causal": True}),
        "causal, scale": ((1, 4, 4, 8), {"is_causal": True, "scale": 0.7}),
        "wide values": ((5, 2, 2, 24), {"is_causal": True}),
        "grouped": ((3, 4, 2, 8), {"is_causal": True, "enable_gqa": True}),
        "grouped, mask": ((3, 4, 1, 8), {"attn_mask": window, "enable_gqa": True}),
        "mask": ((3, 4, 4, 8), {"attn_mask": window}),
        "mask of heads": ((3, 2, 2, 8), {"attn_mask": rand(1, 2, T, T) > 0.3}),
        "bias": ((3, 4, 4, 8), {"attn_mask": -0.1 * steps.float()}),
        "keys": ((3, 4, 4, 8), {"attn_mask": keys}),
        "sees nothing": ((3, 4, 4, 8), {"attn_mask": blind}),
    }


def attention(group: Any, case: str, form: str, balanced: bool, rows: str = "whole") -> dict[str, float]:
    """The largest differences from the whole, of a worker's outputs and gradients."""
    (batch, heads, of_keys, width), given = attention_cases()[case]
    split, rank = SequenceSplit(T, dist.get_world_size(group), balanced), dist.get_rank(group)
    torch.manual_seed(1)
    shapes = (batch, heads, T, 8), (batch, of_keys, T, 8), (batch, of_keys, T, width)
    whole = [torch.randn(s, requires_grad=True) for s in shapes]
    weights = torch.randn(batch, heads, T, width)
    want = F.scaled_dot_product_attention(*whole, **given)
    wanted = torch.autograd.grad((want * weights).sum(), whole)
    parts = [split.part(x.detach(), 2, rank).requires_grad_() for x in whole]
    mask = given.get("attn_mask")
    if mask is not None and rows == "local":
        mask = split.part(mask, -1 if mask.shape[-2] == 1 else -2, rank)
    with attending(group, split, form):
        out = F.scaled_dot_product_attention(*parts, **{**given, "attn_mask": mask})
        got = torch.autograd.grad((out * split.part(weights, 2, rank)).sum(), parts)
    pairs = {"output": (out, want), **{n: pair for n, *pair in zip("qkv", got, wanted)}}
    return {n: apart(a, split.part(b, 2, rank)) for n, (a, b) in pairs.items()}


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of numbers above 1 in parts of them."""
    return float((got.detach() - want.detach()).abs().max() / want.detach().abs().max().clamp(min=1))


def all_attention(rank: int, size: int, place: str) -> dict[str, dict[str, float]]:
    with world(place, rank, size) as group:
        return {
            f"{case}, {form}, {balanced=}, {rows} mask": attention(group, case, form, balanced, rows)
            for case, (_, given) in attention_cases().items()
            for rows in (("whole", "local") if "attn_mask" in given else ("whole",))
            for form in FORMS
            for balanced in (True, False)
        }


@pytest.mark.short(1)
@pytest.mark.parametrize("size", [2, 4])
def test_attention_is_that_of_the_whole(size: int, tmp_path: Path) -> None:
    for results in run(size, all_attention, str(tmp_path / "store")):
        worst = {case: d for case, d in results.items() if not max(d.values()) < CLOSE}  # nan is not below
        assert not worst
        assert len(results) == 68


def learned_bias_and_autocast(rank: int, size: int, place: str) -> tuple[float, float, torch.dtype]:
    with world(place, rank, size) as group:
        split = SequenceSplit(T, size)
        torch.manual_seed(1)
        q, k, v = torch.randn(3, 2, 4, T, 8)
        bias = torch.randn(1, 4, T, T, requires_grad=True)
        F.scaled_dot_product_attention(q, k, v, bias).square().sum().backward()
        want, bias.grad = bias.grad, None
        mine = [split.part(x, 2, rank) for x in (q, k, v)]
        with attending(group, split, "ring"):
            F.scaled_dot_product_attention(*mine, attn_mask=bias).square().sum().backward()
        assert bias.grad is not None
        assert want is not None
        dist.all_reduce(bias.grad)
        of_bias = apart(bias.grad, want)
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with attending(group, split, "ring"), torch.autocast("cpu", torch.bfloat16):
            out = F.scaled_dot_product_attention(*mine, is_causal=True)
        return of_bias, apart(out, split.part(whole, 2, rank)), out.dtype


def test_a_learned_bias_gets_its_gradient_and_autocast_is_heeded(tmp_path: Path) -> None:
    for of_bias, other, dtype in run(2, learned_bias_and_autocast, str(tmp_path / "store")):
        assert of_bias < CLOSE
        assert 0 < other < 2e-2
        assert dtype == torch.bfloat16


class Packets(TorchDispatchMode):
    """The most tensors of one size that lived at once."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.most, self._alive = numbers, 0, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() == self.numbers * 4:
                self._alive.add(x.untyped_storage())
                self.most = max(self.most, len(self._alive))
        return out


def most_packets(rank: int, size: int, place: str) -> tuple[int, int, int]:
    with world(place, rank, size) as group:
        split = SequenceSplit(32, size)
        q, k, v = (torch.randn(1, 1, split.local, 64, requires_grad=True) for _ in range(3))
        with attending(group, split, "ring"), Packets(2 * k.numel()) as forward:
            out = F.scaled_dot_product_attention(q, k, v)
        with Packets(2 * k.numel()) as backward:
            out.sum().backward()
        with attending(group, split, "gather"), Packets(size * 2 * k.numel()) as everything:
            F.scaled_dot_product_attention(q, k, v)
        return forward.most, backward.most, everything.most


def test_the_ring_holds_keys_and_values_of_two(tmp_path: Path) -> None:
    """Forward: those at hand and those on their way; in backward, as many gradients travel, and one is being made."""
    for forward, backward, everything in run(4, most_packets, str(tmp_path / "store")):
        assert forward == 2
        assert backward <= 5
        assert everything >= 1  # all four at once, in the other form


# Training.

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
}


def batches(steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of several lengths, batches of odd sizes."""
    generator = torch.Generator().manual_seed(5)
    lengths = [16 * size if size == 2 else 32, 64, 48, 16]
    windows = [torch.randint(97, 122, (3, lengths[i % 4] + 1), generator=generator) for i in range(steps)]
    return [(w[:, :-1], w[:, 1:]) for w in windows]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, compute: Callable[[Any], Tensor]
) -> list[float]:
    losses = []
    for batch in data:
        optimizer.zero_grad()
        losses.append(float(compute(batch)))
        optimizer.step()
    return losses


def small_gpt() -> nn.Module:
    torch.manual_seed(0)
    return SHAPE.build()


def whole_losses(optimizer: str, data: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = small_gpt()

    def compute(batch: Any) -> Tensor:
        loss = _cross_entropy(model(batch[0]), batch)
        loss.backward()
        return loss.detach()

    return train(model, OPTIMIZERS[optimizer](model.parameters()), data, compute), dict(model.state_dict())


def part_losses(
    group: Any, data: Any, model: nn.Module, optimizer: Any, form: str, balanced: bool, sums: bool
) -> list[float]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def compute(batch: Any) -> Tensor:
        split = SequenceSplit(sequence_length(batch), size, balanced)
        part = take_part(batch, split, rank)
        with attending(group, split, form):
            loss = part_loss(_cross_entropy, model(part[0]), part, loss_share(None, batch, split, rank))
            loss.backward()
        if sums:
            summed = nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])
            dist.all_reduce(summed, group=group)
            for p, g in zip(model.parameters(), summed.split([p.numel() for p in model.parameters()])):
                p.grad = g.view_as(p)
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=group)
        return loss

    return train(model, OPTIMIZERS[optimizer](model.parameters()), data, compute)


WAYS = [("ring", True), ("gather", False)]


def all_training(rank: int, size: int, place: str, wanted: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Largest difference of losses and of weights, after ten steps."""
    found = {}
    data = batches(10, size)
    with world(place, rank, size) as group:
        for optimizer in OPTIMIZERS:
            want, whole = wanted[optimizer]
            for form, balanced in WAYS:
                model = small_gpt()
                got = part_losses(group, data, model, optimizer, form, balanced, True)
                weights = max(apart(a, b) for a, b in zip(model.state_dict().values(), whole.values()))
                found[f"{optimizer}, {form}, {balanced=}"] = max(abs(a - b) for a, b in zip(got, want)), weights
    return found


@pytest.mark.short(1)
@pytest.mark.parametrize("size", [2, 4])
def test_ten_steps_are_those_of_the_whole_model(size: int, tmp_path: Path) -> None:
    wanted = {optimizer: whole_losses(optimizer, batches(10, size)) for optimizer in OPTIMIZERS}
    for found in run(size, all_training, str(tmp_path / "store"), wanted):
        assert len(found) == 2 * len(WAYS)
        assert not {name: pair for name, pair in found.items() if not pair[0] < CLOSE}
        assert not {name: pair for name, pair in found.items() if "sgd" in name and not pair[1] < CLOSE}


def other_wrappings(rank: int, size: int, place: str) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    data = batches(5, size)
    want, _ = whole_losses("sgd", data)
    found = {}
    with world(place, rank, size):
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("context",))
        sharded = small_gpt()
        for layer in (*sharded.blocks, sharded):  # type: ignore[misc]
            fully_shard(layer, mesh=mesh).set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
        found["sharded"] = part_losses(mesh.get_group(), data, sharded, "sgd", "ring", True, False)
        saving = small_gpt()
        for block in saving.blocks:  # type: ignore[union-attr]
            block.forward = _checkpointed(block.forward)
        found["recomputed"] = part_losses(mesh.get_group(), data, saving, "sgd", "ring", True, True)
    return {name: max(abs(a - b) for a, b in zip(got, want)) for name, got in found.items()}


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def test_sharded_weights_and_recomputed_activations(tmp_path: Path) -> None:
    for found in run(2, other_wrappings, str(tmp_path / "store")):
        assert set(found) == {"sharded", "recomputed"}
        assert not {name: most for name, most in found.items() if not most < CLOSE}


# Models as they are found.


class Tokens(nn.Module):
    """A layer of attention over tokens that are placed by one of several ways, and then told apart by `mixer`."""

    def __init__(self, place: str, mixer: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.place, self.mixer = nn.Embedding(50, 16), place, mixer
        self.table = nn.Parameter(torch.zeros(1, 64, 16))
        self.learned = nn.Embedding(64, 16)
        angles = torch.outer(torch.arange(64.0), 0.1 ** torch.arange(8.0))
        self.register_buffer("angles", torch.cat([angles, angles], -1)[None])
        self.register_buffer("ids", torch.arange(64)[None])
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mixed(self.placed(self.embed(tokens), tokens.shape[1]))
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.place == "rotary":
            q, k = self.turned(q), self.turned(k)
        return self.head(x + self.attended(*(y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (q, k, v))))

    def placed(self, x: Tensor, t: int) -> Tensor:
        ways: dict[str, Callable[[], Tensor]] = {
            "table": lambda: self.table[:, :t],
            "narrow": lambda: self.table.narrow(1, 0, t),
            "ellipsis": lambda: self.table[0][..., :t, :],
            "learned": lambda: self.learned(torch.arange(0, t, device=x.device)),
            "ids": lambda: self.learned(self.ids[:, 0:t]),
            "sine": lambda: torch.sin(torch.arange(t, dtype=torch.float32)[:, None] * torch.arange(1, 17)),
            "counted": lambda: self.learned(torch.ones(t, dtype=torch.long).cumsum(0) - 1),
            "ends": lambda: self.learned(torch.linspace(0, t - 1, t).round().long()),
        }
        return x + ways[self.place]() if self.place in ways else x

    def mixed(self, x: Tensor) -> Tensor:
        return x if self.mixer is None else x + self.mixer(x.transpose(1, 2)).transpose(1, 2)

    def turned(self, x: Tensor) -> Tensor:
        angle = self.angles[:, : x.shape[1], :]
        return x * angle.cos() + torch.cat([-x[..., 8:], x[..., :8]], -1) * angle.sin()

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.place == "by hand":
            scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1)
            return (scores @ v).transpose(1, 2).flatten(2)
        mask = {
            "tril": lambda t: torch.ones(t, t).tril().bool(),
            "additive": nn.Transformer.generate_square_subsequent_mask,
            "table mask": lambda t: torch.ones(64, 64).tril().bool()[:t, :t],
            "distance": lambda t: -(torch.arange(t)[:, None] - torch.arange(t)).abs().float(),
        }.get(self.place)
        given = {"is_causal": True} if mask is None else {"attn_mask": mask(q.shape[2])}
        return F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).flatten(2)


SAMPLE = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(9))


@BOTH
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "place",
    ["none", "table", "narrow", "ellipsis", "learned", "ids", "sine", "rotary", "tril", "additive", "table mask"],
)
def test_models_that_place_their_tokens_are_the_same(place: str, size: int, balanced: bool) -> None:
    model = Tokens(place)
    before = copy.deepcopy(model.state_dict())
    verify(model, (SAMPLE,), size, balanced=balanced)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Tokens("counted"), "first in learned.*position_ids"),
        (Tokens("ends"), "first in learned"),
        (Tokens("by hand"), "scaled_dot_product_attention"),
        (Tokens("distance"), "attn_mask.*does not cover the other.*is_causal=True"),
        (Tokens("table", nn.Conv1d(16, 16, 3, padding=1)), "first in mixer"),
        (Tokens("table", nn.BatchNorm1d(16)), "first in mixer"),
    ],
)
def test_a_model_that_differs_on_parts_is_refused(model: nn.Module, says: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidInput, match=says):
        verify(model, (SAMPLE,), 2)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@BOTH
def test_torchs_own_transformer_layers(balanced: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    causal = nn.Transformer.generate_square_subsequent_mask
    sample = torch.randn(3, 16, 16)
    for chosen in (encoder, encoder.eval()):
        verify(chosen, (sample,), 2, balanced=balanced)
        verify(chosen, (sample,), 2, balanced=balanced, forward=lambda b: encoder(b[0], causal(b[0].shape[1])))
    padding = torch.arange(16)[None] >= torch.tensor([16, 11, 3])[:, None]
    verify(encoder, (sample, padding), 2, balanced=balanced, forward=lambda b: encoder(b[0], src_key_padding_mask=b[1]))
    attention = nn.MultiheadAttention(
        16, 2, batch_first=True
    )  # it would compute its weights, if it were not asked not to
    verify(attention, (sample,), 2, balanced=balanced, forward=lambda b: attention(b[0], b[0], b[0])[0])


def test_cross_attention_to_what_all_have_is_left_alone() -> None:
    attention, memory = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 5, 16)
    verify(attention, (torch.randn(3, 16, 16),), 2, forward=lambda b: attention(b[0], memory, memory)[0])


def test_losses_are_compared_too() -> None:
    model, batch = small_gpt(), batches(1, 2)[0]

    def forward(part: Any) -> Any:
        return model(part[0])

    def next_token(output: Tensor, part: Any) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), part[0][:, 1:].flatten())

    verify(model, batch, 4, forward=forward, loss=_cross_entropy)
    with pytest.raises(InvalidInput, match="losses add up to"):
        verify(model, batch, 4, forward=forward, loss=next_token)
    masked = batch[1].masked_fill(torch.arange(batch[1].shape[1]) < 9, -100)
    verify(model, (batch[0], masked), 2, forward=forward, loss=_cross_entropy, weight=_counted)
    with pytest.raises(InvalidInput, match="does the task's weight count the tokens"):
        verify(model, (batch[0], masked), 2, forward=forward, loss=_cross_entropy)


def transformers_models() -> list[str]:
    return ["llama", "llama without a cache", "gpt2", "bert"]


def transformers_model(name: str) -> nn.Module:
    library = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name.startswith("llama"):
        shape["use_cache"] = name == "llama"  # without one it looks at positions
        made = library.LlamaForCausalLM(library.LlamaConfig(vocab_size=50, num_key_value_heads=2, **shape))
    elif name == "gpt2":
        quiet = {"vocab_size": 50, "n_positions": 64, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
        made = library.GPT2LMHeadModel(library.GPT2Config(n_embd=32, n_layer=2, n_head=4, **quiet))
    else:
        config = library.BertConfig(vocab_size=50, attention_probs_dropout_prob=0.0, **shape)
        made = library.BertModel(config, add_pooling_layer=False)
    assert isinstance(made, nn.Module)
    return made.train()


@pytest.mark.parametrize("name", transformers_models())
def test_models_of_transformers_as_they_are(name: str) -> None:
    model = transformers_model(name)
    padding = (torch.arange(24)[None] < torch.tensor([24, 17, 4])[:, None]).long()
    for balanced in (True, False):
        verify(model, {"input_ids": SAMPLE}, 2, balanced=balanced)
        batch = {"input_ids": SAMPLE, "attention_mask": padding}
        verify(model, batch, 2, balanced=balanced)


@given(size=st.integers(1, 4), chunk=st.integers(2, 4), balanced=st.booleans(), first=st.integers(0, 1))
def test_the_distance_of_positions_is_that_in_the_sequence(size: int, chunk: int, balanced: bool, first: int) -> None:
    split = SequenceSplit(2 * size * chunk, size, balanced)
    for rank in range(size):
        peers = GroupPeers.__new__(GroupPeers)
        peers.rank, peers.size = rank, size
        mine = split.positions(rank)[None]
        before = {"prepend": mine[:, :1] - 1} if first else {}
        others = torch.diff(2 * mine, **before)
        with attending(peers, split):
            assert torch.equal(torch.diff(mine, **before), torch.ones(1, split.local - 1 + first, dtype=torch.long))
            assert torch.equal(mine.diff(), torch.ones(1, split.local - 1, dtype=torch.long))
            assert torch.equal(torch.diff(2 * mine, **before), others)


# Random numbers.


@BOTH
@pytest.mark.parametrize("inplace", [True, False])
def test_dropout_leaves_out_what_it_leaves_out_of_the_whole(balanced: bool, inplace: bool) -> None:
    split, drop = SequenceSplit(24, 3, balanced), nn.Dropout(0.4, inplace)
    whole = torch.rand(2, 24, 5, requires_grad=True)

    def parts() -> Iterator[Tensor]:
        for rank in range(3):
            torch.manual_seed(1)
            peers = GroupPeers.__new__(GroupPeers)
            peers.rank, peers.size = rank, 3
            with attending(peers, split):
                yield drop(split.part(whole, 1, rank) * 1.0)

    torch.manual_seed(1)
    dropped = drop(whole * 1.0)
    assert torch.equal(split.join(list(parts()), 1), dropped)
    assert torch.equal(*(torch.autograd.grad(y.sum(), whole)[0] for y in (dropped, split.join(list(parts()), 1))))
    drop.eval()
    assert torch.equal(split.join(list(parts()), 1), whole)


# Refusals.


def alone_of_two() -> Any:
    peers = GroupPeers.__new__(GroupPeers)
    peers.rank, peers.size = 0, 2
    return peers


@pytest.mark.parametrize(
    ("shapes", "given", "says"),
    [
        ((4, 4), {"dropout_p": 0.1}, "dropout = 0.1.*set the model's attention dropout to 0"),
        ((4, 4), {"attn_mask": torch.rand(4, 4)}, r"attn_mask.*4 queries for 8 keys.*\[..., 4 or 8, 8\]"),
        ((4, 4), {"attn_mask": torch.ones(4, 6).bool()}, "attn_mask"),
        ((4, 4), {"attn_mask": torch.ones(4, 8).bool(), "is_causal": True}, "not both"),
        ((3, 4), {}, "latent queries"),
        ((4, 6), {"is_causal": True}, "causal cross-attention"),
    ],
)
def test_attention_that_cannot_be_split_is_refused(shapes: tuple[int, int], given: dict[str, Any], says: str) -> None:
    q, k = (torch.rand(1, 2, tokens, 4) for tokens in shapes)
    with attending(alone_of_two(), SequenceSplit(8, 2)), pytest.raises(InvalidInput, match=says):
        F.scaled_dot_product_attention(q, k, k, **given)


class Twin:
    """Peers that all hold what the second of two holds."""

    rank, size = 1, 2

    def gather(self, mine: Tensor) -> Tensor:
        return torch.stack([mine, mine])


@pytest.mark.short(1)
@pytest.mark.parametrize("tokens", [32, 16])
def test_compiled_blocks_attend_too(tokens: int) -> None:
    model, split, part = small_gpt(), SequenceSplit(tokens, 2), torch.randint(0, 256, (2, tokens // 2))
    with attending(Twin(), split):  # type: ignore[arg-type]
        want = model(part)
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend="eager")
        got = model(part)
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)


def test_a_group_of_another_size_or_an_unknown_form_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the group has 2 workers"):
        attending(alone_of_two(), SequenceSplit(8, 4))
    with pytest.raises(InvalidInput, match="use one of gather, ring"):
        attending(alone_of_two(), SequenceSplit(8, 2), "star")


def test_padding_needs_batches_in_attention() -> None:
    keys = torch.ones(2, 8, dtype=torch.bool)
    with (
        attending(alone_of_two(), SequenceSplit(8, 2), keys=keys),
        pytest.raises(InvalidInput, match="add the dimensions of samples and heads"),
    ):
        F.scaled_dot_product_attention(*torch.rand(3, 2, 4, 4))


def test_torch_is_as_before_outside_the_block() -> None:
    before = F.scaled_dot_product_attention
    with attending(alone_of_two(), SequenceSplit(8, 2)):
        assert F.scaled_dot_product_attention is before
        assert torch.arange(4).tolist() == [0, 1, 6, 7]
        assert torch.arange(0, 4.0).tolist() == [0, 1, 6, 7]
        assert torch.arange(1, 4).tolist() == [1, 2, 3]
    assert torch.arange(4).tolist() == [0, 1, 2, 3]


class Wayward(nn.Module):
    """Attends twice, but for a reason that `decide` gives."""

    def __init__(self, decide: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.decide, self.up = decide, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.decide(self, x):
                x = x + F.scaled_dot_product_attention(self.up(x), x, x)
        return self.up(x)


WAYWARD_INPUT = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "decide",
    [
        lambda model, x: not model.training or torch.rand(()) > 0.5,
        lambda model, x: not model.training or random.random() > 0.5,
        lambda model, x: x.shape[0] > 2,
        lambda model, x: bool((model.up(x) == model.up(x)).all()),
    ],
    ids=["torch", "python", "size", "always"],
)
def test_decisions_that_are_the_same_for_all_parts_do_no_harm(decide: Any) -> None:
    model = Wayward(decide)
    for seed in range(4):
        torch.manual_seed(seed)
        random.seed(seed)
        verify(model, (WAYWARD_INPUT,), 4)


@pytest.mark.parametrize(
    ("decide", "says"),
    [
        (lambda model, x: model.up(x).sum() > 0, "exchanges keys and values once more|the output differs"),
        (lambda model, x: model.up(x)[:, 0].sum().item() > 0, "exchanges keys and values once more|the output differs"),
    ],
    ids=["truth", "number"],
)
def test_decisions_by_what_a_part_computes_are_refused(decide: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        verify(Wayward(decide), (WAYWARD_INPUT,), 2)


def test_who_decides_by_numbers_is_told_even_where_all_parts_agree(caplog: Any) -> None:
    verify(Wayward(lambda model, x: bool(model.up(x).isfinite().all())), (WAYWARD_INPUT,), 2)
    assert "Wayward branches on values that it computes" in caplog.text
    caplog.clear()
    verify(Wayward(lambda model, x: bool(WAYWARD_INPUT.isfinite().all())), (WAYWARD_INPUT,), 2)
    assert not caplog.text


@pytest.mark.parametrize("how", ["slice", "narrow"])
def test_a_sequence_longer_than_a_table_of_positions_is_refused(how: str) -> None:
    table, split = nn.Parameter(torch.randn(10, 4)), SequenceSplit(16, 2)
    with (
        attending(alone_of_two(), split),
        pytest.raises(InvalidInput, match="16: the model has a table of 10 positions"),
    ):
        table[:8] if how == "slice" else table.narrow(0, 0, 8)
    with attending(alone_of_two(), SequenceSplit(8, 2)):
        assert table[:4].shape == (4, 4)
        assert table[:8].shape == (8, 4)


def test_padding_that_is_no_part_of_a_batch_is_refused() -> None:
    batch = {"input_ids": torch.tensor([[1, 2, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    found, keys = hide_padding(batch, lambda each: each, 4)
    assert keys.tolist() == [[True, True, False, False]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert hide_padding({**batch, "attention_mask": torch.ones(1, 4)}, lambda each: each, 4)[1] is None
    with pytest.raises(InvalidInput, match=r"attention_mask.*must be part of the batch"):
        hide_padding(batch, lambda each: {"attention_mask": each["input_ids"] != 0}, 4)


@pytest.mark.parametrize("seed", range(12))
def test_samples_that_choose_experts_are_refused_also_where_first_trials_agree(seed: int) -> None:
    torch.manual_seed(seed)
    model = Experts()
    words = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InvalidInput, match="on parts of a sequence"):
        verify(model, (words,), 2)
