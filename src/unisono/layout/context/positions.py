"""Positions that a model computes in `forward`, corrected to those of a worker's own tokens.

A model counts its tokens (``torch.arange(t)``) or takes the first rows of a table of positions (``table[:t]``). On a
worker *t* is the local length, so that both calls would begin at position 0. These functions correct the arguments of
such calls. `verify` finds out whether the calls meant something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.errors import InvalidInput
from unisono.layout.context.sequence_split import SequenceSplit


def arange(split: SequenceSplit, rank: int, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.arange``, except that a call that counts local tokens from 0 gives their positions in the sequence."""
    rest = {key: value for key, value in kwargs.items() if key not in ("start", "end", "step")}
    if _bounds(args, kwargs) != (0, split.local, 1) or "out" in rest:
        return torch.arange(*args, **kwargs)
    real = any(isinstance(x, float) for x in (*args, kwargs.get("end"), kwargs.get("start")))
    kind = float if real else int
    return torch.cat([torch.arange(kind(start), kind(stop), **rest) for start, stop in split.spans(rank)])


def diff(
    split: SequenceSplit, rank: int, input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Tensor:
    """``torch.diff``, except that differences of the local tokens' positions are 1 between a worker's two chunks too.

    Models take any other difference for the beginning of another sequence that is packed into the same row.
    """
    found = torch.diff(input, n, dim, prepend, append)
    last = dim in (-1, input.dim() - 1) and input.shape[-1:] == (split.local,)
    if len(split.spans(rank)) == 2 and last and n == 1 and append is None and not input.is_floating_point():
        before = split.chunk - 1 + (0 if prepend is None else prepend.shape[-1])
        if bool((input == split.positions(rank, input.device)).all()):
            found[..., before] = 1
    return found


def index(split: SequenceSplit, rank: int, table: Tensor, key: Any) -> Tensor:
    """``table[key]``, except that a slice of the first rows, one for each local token, gives the rows of these tokens.

    This concerns only tensors that do not depend on tokens (weights, buffers, constants) and are at least as long as
    the sequence. Two such slices take a square mask: rows of the local tokens, columns of the whole sequence.

    Raises:
        InvalidInput: the table is shorter than the sequence, but longer than the local part.
    """
    entries = list(key) if isinstance(key, tuple) else [key]
    hits = _token_slices(split, table, entries) if _is_constant(table) else []
    if len(hits) not in (1, 2):
        return table[key]
    if len(hits) == 2:
        entries[hits[1]] = slice(0, split.length)
    return _pieces(
        split, rank, _result_dim(entries, table.dim(), hits[0]), lambda span: _at(table, entries, hits[0], span)
    )


def narrow(split: SequenceSplit, rank: int, table: Tensor, dim: int, start: int, length: int) -> Tensor:
    """``table.narrow(dim, start, length)``, with the same exception as in `index`."""
    if (start, length) != (0, split.local) or not _is_constant(table) or not _covers_sequence(table, dim, split):
        return table.narrow(dim, start, length)
    return _pieces(split, rank, dim, lambda span: table.narrow(dim, span.start, span.stop - span.start))


def _is_constant(table: Tensor) -> bool:
    """Whether `table` is, or is a view of, a tensor without gradient history, so that it does not depend on tokens."""
    source = table if table._base is None else table._base
    return source.grad_fn is None


def _pieces(split: SequenceSplit, rank: int, dim: int, piece: Callable[[slice], Tensor]) -> Tensor:
    pieces = [piece(slice(*span)) for span in split.spans(rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _at(table: Tensor, entries: list[Any], place: int, span: slice) -> Tensor:
    return table[tuple(span if i == place else entry for i, entry in enumerate(entries))]


def _bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    names = ("end",) if len(args) == 1 and "end" not in kwargs else ("start", "end", "step")
    given = {"start": 0, "step": 1, **dict(zip(names, args)), **{k: kwargs[k] for k in names if k in kwargs}}
    bounds = given["start"], given.get("end"), kwargs.get("step", given["step"])
    return bounds if all(isinstance(x, int | float) and not isinstance(x, bool) for x in bounds) else None


def _token_slices(split: SequenceSplit, table: Tensor, entries: list[Any]) -> list[int]:
    """Indices of the entries that take the first `split.local` rows of a dimension with a row for every token."""
    if not all(x is None or x is Ellipsis or isinstance(x, slice) or type(x) is int for x in entries):
        return []
    skipped = table.dim() - sum(x is not None and x is not Ellipsis for x in entries)
    hits, dim = [], 0
    for place, entry in enumerate(entries):
        if isinstance(entry, slice) and _takes_first(entry, split.local) and _covers_sequence(table, dim, split):
            hits.append(place)
        dim += skipped if entry is Ellipsis else int(entry is not None)
    return hits


def _covers_sequence(table: Tensor, dim: int, split: SequenceSplit) -> bool:
    """Whether `table` has a row for every token. Raises `InvalidInput` if it has more rows than local tokens, but fewer
    than the sequence."""
    rows = table.shape[dim]
    if split.local < rows < split.length:
        raise InvalidInput(
            "sequence length", split.length, f"the model has a table of {rows} positions", f"cut sequences to {rows} "
            "tokens, or use a model with a longer table")  # fmt: skip
    return rows >= split.length


def _takes_first(entry: slice, count: int) -> bool:
    start, step = (0 if entry.start is None else entry.start), (1 if entry.step is None else entry.step)
    return all(type(x) is int for x in (start, entry.stop, step)) and (start, entry.stop, step) == (0, count, 1)


def _result_dim(entries: list[Any], dims: int, place: int) -> int:
    """The dimension of the result that an entry of the index becomes."""
    taken = entries[:place]
    ellipsis = dims - sum(x is not None and x is not Ellipsis for x in entries) if Ellipsis in taken else 0
    return ellipsis + sum(x is None or isinstance(x, slice) for x in taken)
