"""MXNet's gradient compression: what a worker sends in place of a pushed gradient.

    2bit    r += g; sends t where r >= t, -t where r <= -t, else 0; r -= what was sent      (`TwoBit`)
    1bit    r += g; sends 1 where r > t, else -1; r -= what was sent                        (`SignAboveThreshold`)

g is the gradient of a worker, r its residual. `OneBit` is another compressor: it measures a magnitude for each block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.compress import Compressor, TwoBit
from unisono.compress.block_codec import BlockCodec
from unisono.errors import InvalidInput

THRESHOLD = 0.5
"""The threshold where none is given."""


@dataclass(frozen=True)
class SignAboveThreshold(BlockCodec):
    """Sends 1 where ``x > threshold``, else -1, with error feedback. One bit per number.

    As in MXNet's ``{"type": "1bit", "threshold": threshold}``. The numbers that are sent do not depend on the scale of
    the gradient, so it is the caller who scales it. A number that is not finite is sent as 1 or -1, and stays in the
    residual.
    """

    threshold: float

    @property
    def block(self) -> int:  # type: ignore[override]
        """The numbers that are processed together."""
        return 256

    @property
    def code_bits(self) -> int:
        return 1

    @property
    def step(self) -> int:
        return 2

    @property
    def scaled(self) -> bool:
        return False

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        """Ones."""
        return x.new_ones(len(x), 1)

    def levels(self, x: Tensor, scales: Tensor, dither: Tensor | None, out: Tensor) -> None:
        torch.gt(x, self.threshold, out=out)
        out.mul_(2).sub_(1)

    def values(self, levels: Tensor, scales: Tensor) -> None:
        """The levels are the values."""


def compressor_of(params: Any) -> Compressor:
    """The compressor of MXNet's ``compression_params``.

    Raises:
        InvalidInput: there is none.
    """
    if not isinstance(params, Mapping) or params.get("type") not in ("1bit", "2bit"):
        raise InvalidInput("compression_params", params, "its type is neither '2bit' nor '1bit'",
                           "pass for instance {'type': '2bit', 'threshold': 0.5}")  # fmt: skip
    if unknown := params.keys() - {"type", "threshold"}:
        raise InvalidInput("compression_params", str(sorted(map(str, unknown))), "it has no such entry",
                           "leave these out")  # fmt: skip
    threshold, two = params.get("threshold", THRESHOLD), params["type"] == "2bit"
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number or not abs(threshold) <= 1e30 or (two and threshold < 1e-30):
        raise InvalidInput("threshold", threshold, "it is no number that fp32 has" + " above 0" * two,
                           "pass about the largest magnitude of usual gradients")  # fmt: skip
    return TwoBit(float(threshold)) if two else SignAboveThreshold(float(threshold))
