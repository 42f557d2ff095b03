"""Traits of torch's operators that the recorder needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# Operators that overwrite every element of their first argument without reading it. How many random numbers they draw,
# if any, depends only on the number of elements.
_FILLS = {
    "aten::" + name
    for name in (
        *(
            "zero_",
            "fill_",
            "copy_",
            "normal_",
            "uniform_",
            "random_",
            "bernoulli_",
            "exponential_",
            "geometric_",
        ),
        *("log_normal_", "cauchy_"),
    )
}
# Operators that read only shape, strides and dtype of their first argument.
_GEOMETRY_ONLY = {
    "aten::" + name
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
}
_EXOTIC = ("sparse", "mkldnn", "quantize", "nested")


@dataclass(frozen=True)
class Traits:
    """Traits of an operator.

    Args:
        written: positions and keywords of the arguments that the operator writes to.
        draws: whether it draws random numbers.
        fills: whether it overwrites its first argument completely.
        geometry_only: whether it reads only shape, strides and dtype of its first argument.
        changes_view: whether it changes shape, strides or offset of a tensor in place, but no content.
        data_dependent: whether its result, or the result's shape, depends on the content of tensors.
        has_device: whether it has an argument `device`.
        strided: whether it works on strided tensors only.
    """

    written: frozenset[int | str]
    draws: bool
    fills: bool
    geometry_only: bool
    changes_view: bool
    data_dependent: bool
    has_device: bool
    strided: bool


@cache
def traits(operator: Any) -> Traits:
    """The traits of one overload, from its schema and tags."""
    schema, tags = operator._schema, operator.tags
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
    return Traits(
        written=frozenset(written),
        draws=torch.Tag.nondeterministic_seeded in tags,
        fills=schema.name in _FILLS,
        geometry_only=schema.name in _GEOMETRY_ONLY,
        changes_view=torch.Tag.inplace_view in tags,
        data_dependent=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        has_device=any(argument.name == "device" for argument in schema.arguments),
        strided=not any(word in schema.name for word in _EXOTIC),
    )
