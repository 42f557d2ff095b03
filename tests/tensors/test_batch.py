"""What a batch holds, in any kind of container."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding

from unisono.errors import InvalidInput
from unisono.tensors.batch import mapped, samples_in, tensors, to_device

META = torch.device("meta")
X, Y = torch.arange(15.0).view(5, 3), torch.arange(5)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    labels: Tensor
    name: str = "a graph"


class ReadOnly(Mapping[str, Any]):
    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Points:
    """A batch of a kind of its own, which knows how to move."""

    def __init__(self, at: Tensor) -> None:
        self.at = at

    def __len__(self) -> int:
        return len(self.at)

    def to(self, device: torch.device) -> Points:
        return Points(self.at.to(device))


BATCHES: dict[str, Any] = {
    "tensor": X,
    "list": [X, Y],
    "tuple": (X, Y),
    "dict": {"x": X, "y": Y},
    "ordered": OrderedDict(x=X, y=Y),
    "default": defaultdict(list, x=X, y=Y),
    "user": UserDict(x=X, y=Y),
    "proxy": MappingProxyType({"x": X, "y": Y}),
    "read only": ReadOnly(x=X, y=Y),
    "encoding": BatchEncoding({"input_ids": X, "labels": Y}),
    "named": Pair(X, Y),
    "dataclass": Graph(X, Y),
    "nested": ({"x": [Pair(X, Y)]}, Y),
    "scalar first": (torch.tensor(2.0), X),
    "words first": (["a word", "b", "c", "d", "e"], X),
    "array": {"x": X.numpy()},
    "packed": (pack_sequence([X, X[:4], X[:3], X[:2], X[:1]]), Y),
    "of its own": Points(X),
    "words": ["a word", "b", "c", "d", "e"],
    "nested words": {"words": ["a word", "b", "c", "d", "e"], "numbers": [1, 2, 3, 4, 5]},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_samples_are_counted_in_any_kind_of_batch(kind: str) -> None:
    assert samples_in(BATCHES[kind]) == 5


@pytest.mark.parametrize("batch", [torch.tensor(3.0), {}, {"mode": "fast", "rate": 2}, None, 7, Pair(1, 2)])  # type: ignore[arg-type]
def test_a_batch_that_shows_no_samples_is_refused(batch: Any) -> None:
    with pytest.raises(InvalidInput, match=r"give Task\(weight=\.\.\.\)"):
        samples_in(batch)


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_moves_keeps_its_kind(kind: str) -> None:
    batch = BATCHES[kind]
    moved = to_device(batch, META)
    assert type(moved) is (dict if kind in ("proxy", "read only") else type(batch))
    there = list(tensors(moved.at if kind == "of its own" else moved))
    here = list(tensors(batch.at if kind == "of its own" else batch))
    assert [x.shape for x in there] == [x.shape for x in here]
    sizes = 1 if kind == "packed" else 0  # lengths of packed sequences stay with the host
    assert sum(not x.is_meta for x in there) == sizes
    assert all(not x.is_meta for x in here), "the batch itself was left alone"


def test_what_is_beside_the_items_goes_along() -> None:
    batch = BatchEncoding({"input_ids": X}, n_sequences=2)
    moved = to_device(batch, META)
    assert moved.input_ids.is_meta
    assert moved.n_sequences == 2
    assert not batch["input_ids"].is_meta
    assert to_device(defaultdict(list, x=X), META).default_factory is list
    assert to_device(Graph(X, Y), META).name == "a graph"
    packed = to_device(pack_sequence([X, X[:2]]), META)
    assert isinstance(packed, PackedSequence)
    assert packed.data.is_meta


def test_a_function_is_applied_to_every_tensor_in_its_place() -> None:
    batch = Pair({"a": [X, "word", 3]}, (Y, None))  # type: ignore[arg-type]
    doubled: Any = mapped(lambda x: 2 * x, batch)
    assert isinstance(doubled, Pair)
    assert torch.equal(doubled.x["a"][0], 2 * X)
    assert doubled.x["a"][1:] == ["word", 3]
    assert torch.equal(doubled.y[0], 2 * Y)
    assert doubled.y[1] is None
    assert [x.shape for x in tensors(batch)] == [X.shape, Y.shape]
    assert np.array_equal(mapped(lambda x: x + 1, {"x": X.numpy()})["x"], X.numpy())
