"""Compressed pushes are, bit for bit, those of MXNet's formulas in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kvstore.reference import Reference, one_bit, two_bit
from tests.kvstore.stores import CELLS, DISTRIBUTED, SHAPE, as_torch, gradients, normal, on_workers, pulled
from unisono.compress import CompressorMemory, TwoBit
from unisono.errors import InvalidInput
from unisono.kvstore import KVStore, create
from unisono.kvstore.gradient_compression import SignAboveThreshold, compressor_of

STEPS, DEVICES = 4, 2
COMPRESSED_CELLS = [(name, size) for name, size in CELLS if name != "local" and "async" not in name]
PARAMS = [
    ({"type": "2bit", "threshold": 0.75}, two_bit(0.75)),
    ({"type": "2bit"}, two_bit(0.5)),
    ({"type": "1bit", "threshold": 0.1}, one_bit(0.1)),
    ({"type": "1bit", "threshold": -0.25}, one_bit(-0.25)),
]


def add(key: object, received, stored) -> None:
    stored += received


def plus(received: np.ndarray, stored: np.ndarray) -> None:
    stored += received


@pytest.mark.parametrize(("name", "size"), COMPRESSED_CELLS)
@pytest.mark.parametrize(("params", "compress"), PARAMS, ids=lambda each: each if isinstance(each, dict) else "")
@pytest.mark.parametrize("bound", [1, 1000])
def test_pushes_are_compressed_with_error_feedback(name, size, params, compress, bound) -> None:
    """What `init` stores is not. Distributed stores compress the sum over a worker's devices, `device` each of them."""

    def work(kv: KVStore) -> list[np.ndarray]:
        kv.set_updater(add)
        kv.set_gradient_compression(params)
        kv.init("w", normal(0))
        found = [pulled(kv, "w")]
        for step in range(STEPS):
            kv.push("w", as_torch(gradients(kv.rank, step, DEVICES)))
            found.append(pulled(kv, "w"))
        return found

    reference = Reference(normal(0), plus, compress, per_device=name not in DISTRIBUTED)
    expected = [normal(0)]
    for step in range(STEPS):
        reference.push([gradients(worker, step, DEVICES) for worker in range(size)])
        expected.append(reference.value.copy())
    for found in on_workers(name, size, work, bigarray_bound=bound):
        np.testing.assert_array_equal(found, expected)


def test_a_single_device_is_compressed_too() -> None:
    kv = create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 2.0})
    kv.init("w", np.zeros(3, np.float32))
    kv.push("w", np.array([2.5, -2.0, 1.0]))
    assert pulled(kv, "w", (3,)).tolist() == [2, -2, 0]


@pytest.mark.parametrize("size", [1, 3])
def test_asynchronous_pushes_are_compressed(size) -> None:
    def work(kv: KVStore) -> np.ndarray:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.set_updater(add)
        kv.init("w", np.zeros(SHAPE, np.float32))
        for _ in range(3):  # the residual is 0.4, then 0.8 of which 0.5 is sent, then 0.7
            kv.push("w", np.full(SHAPE, 0.4))
        kv.barrier()
        return pulled(kv, "w")

    for found in on_workers("dist_async", size, work):
        assert (found == size).all()


def test_residuals_are_empty_with_each_new_compression() -> None:
    kv = create("device")
    kv.init("w", np.zeros(1, np.float32))
    for _ in range(2):
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.push("w", np.full(1, 0.75))
        assert pulled(kv, "w", (1,)).item() == 0


def test_a_number_that_is_not_finite_arrives_by_two_bits() -> None:
    kv = create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    kv.init("w", np.zeros(2, np.float32))
    kv.push("w", np.array([np.nan, 0.0]))
    assert np.isnan(pulled(kv, "w", (2,))[0])


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000, 300_000])
def test_one_bit_messages_of_any_length(numel) -> None:
    compress, memory, reference = SignAboveThreshold(0.2), CompressorMemory(), one_bit(0.2)
    residual = np.zeros(numel, np.float32)
    for step in range(2):
        x = normal(numel, step, shape=(numel,))
        message = compress.encode_with_feedback(torch.from_numpy(x.copy()), (), memory)
        memory.commit()
        assert message.numel() <= numel / 8 + 8
        found = compress.decode(message, (), numel, torch.float32)
        np.testing.assert_array_equal(found.numpy(), reference(x, residual))


def test_the_compressors() -> None:
    assert compressor_of({"type": "2bit"}) == TwoBit(0.5)
    assert compressor_of({"type": "1bit", "threshold": 1}) == SignAboveThreshold(1.0)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"type": "3bit"}, "its type is neither '2bit' nor '1bit'"),
        ({}, "its type is neither"),
        ("2bit", "its type is neither"),
        ({"type": "2bit", "treshold": 1}, r"compression_params = \['treshold'\]: it has no such entry"),
        ({"type": "2bit", "threshold": 0}, "threshold = 0: it is no number that fp32 has above 0"),
        ({"type": "2bit", "threshold": -1.0}, "above 0"),
        ({"type": "2bit", "threshold": "1"}, "threshold = 1: "),
        ({"type": "2bit", "threshold": True}, "threshold = True: "),
        ({"type": "1bit", "threshold": float("nan")}, "threshold = nan: "),
        ({"type": "1bit", "threshold": float("inf")}, "threshold = inf: "),
    ],
)
def test_other_parameters_are_refused(params, match) -> None:
    with pytest.raises(InvalidInput, match=match):
        create("device").set_gradient_compression(params)


def test_a_local_store_sends_nothing() -> None:
    with pytest.raises(InvalidInput, match="type = local: nothing is sent that could be compressed"):
        create("local").set_gradient_compression({"type": "2bit"})


def test_other_dtypes_are_not_compressed() -> None:
    kv = create("device")
    kv.set_gradient_compression({"type": "2bit"})
    kv.init("w", np.zeros(2))
    with pytest.raises(InvalidInput, match="dtype = float64: gradients of key 'w' are compressed as float32"):
        kv.push("w", np.ones(2))
