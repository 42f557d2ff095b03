"""The content of a checkpoint as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint, StoredBox
from unisono.checkpoint.safetensors_format import dtype_name
from unisono.errors import printable


def contents(opened: OpenedCheckpoint) -> list[str]:
    """Lines of text: step, workers, totals by the first part of the names, and every tensor."""
    kinds: dict[str, list[str]] = {}
    for name in opened.specs:
        kinds.setdefault(name.partition("/")[0] if "/" in name else "others", []).append(name)
    summary: list[tuple[str, ...]] = [("", "tensors", "numbers", "bytes")]
    summary += [_sum(opened, kind, names) for kind, names in [*sorted(kinds.items()), ("all", list(opened.specs))]]
    weights = _elements(opened, kinds.get("model", []))
    workers = f"{len(opened.parts)} worker{'s' * (len(opened.parts) != 1)}"
    return [
        str(opened.path),
        f"step {opened.step}, {weights:,} weights, written by {workers}{_settings(opened.meta)}",
        "",
        *_aligned(summary),
        "",
        *_aligned(_tensors(opened)),
    ]


def _settings(meta: Any) -> str:
    """Layout, synchronizer and compressor of the run, as far as the checkpoint has them."""
    config = meta.get("config") if isinstance(meta, dict) else None
    settings = config if isinstance(config, dict) else {}
    shown = [(key, settings[key]) for key in ("layout", "sync", "compress") if settings.get(key)]
    return "".join(f", {key} {printable(str(value))}" for key, value in shown)


def _tensors(opened: OpenedCheckpoint) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("tensor", "dtype", "shape", "parts")]
    for name in sorted(opened.specs):
        spec, boxes = opened.specs[name], opened.stored[name]
        where = ", ".join(map(_where, boxes[:4]))
        more = f", … {len(boxes)} boxes" if len(boxes) > 4 else ""
        rows.append((printable(name), dtype_name(spec.dtype), "×".join(map(str, spec.shape)) or "scalar", where + more))
    return rows


def _where(stored: StoredBox) -> str:
    part = stored.file.stem.removeprefix("part-")
    return part if stored.box.is_whole else f"{part} {stored.box}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    numbers = [all(re.fullmatch(r"[\d,]+", row[i]) for row in rows[1:]) for i in range(len(widths))]
    return [
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers)).rstrip() for row in rows
    ]


def _sum(opened: OpenedCheckpoint, kind: str, names: Sequence[str]) -> tuple[str, ...]:
    nbytes = sum(opened.specs[name].nbytes for name in names)
    return printable(kind), f"{len(names):,}", f"{_elements(opened, names):,}", f"{nbytes:,}"


def _elements(opened: OpenedCheckpoint, names: Sequence[str]) -> int:
    return sum(math.prod(opened.specs[name].shape) for name in names)
