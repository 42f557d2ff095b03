"""Cost of compression on one core: ``python -m benchmarks compress [--numel N] [--repeats N] [--json FILE]``.

For every compressor: nanoseconds of CPU time per number, next to a plain copy and a plain addition of the same numbers,
and the bits sent per number. `encode` makes a message, `encode_with_feedback` also keeps its residual, and `decode`
reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.harness import Spread, interleave
from unisono import notation
from unisono.compress import (
    COMPRESSORS,
    Auto,
    ByName,
    BySize,
    Cast,
    Compressor,
    CompressorMemory,
    Exact,
    OneBit,
    PowerSGD,
    Quantize,
    RandomK,
    Span,
    TopK,
    TwoBit,
    WithErrorFeedback,
    bits,
)

WAYS: list[Compressor] = [
    *(Cast(), Cast("bf16"), WithErrorFeedback(Cast("bf16")), Exact()),
    *(Quantize(8), Quantize(4), Quantize(8, stochastic=True), Quantize(4, stochastic=True)),
    *(OneBit(), TwoBit(2.0), TopK(0.01), TopK(0.001), RandomK(0.01), PowerSGD(2)),
]
STAND_FOR_OTHERS = {Auto, BySize, ByName}
COLUMNS = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--numel", type=int, default=2 << 20, help="numbers in a total (2 Mi: a bucket of 8 MB)")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    asked = parser.parse_args(arguments)
    forgotten = set(COMPRESSORS.values()) - {type(c) for c in WAYS} - STAND_FOR_OTHERS
    if forgotten:
        sys.exit(f"no figures for {', '.join(sorted(cls.__name__ for cls in forgotten))}: add them to WAYS")
    torch.set_num_threads(1)
    numel = asked.numel // COLUMNS * COLUMNS
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    spans = (Span("weight", torch.Size((numel // COLUMNS, COLUMNS)), (COLUMNS, 1), 0, numel),)
    timed = {("copy", ""): _timed(_copy(x)), ("add", ""): _timed(_add(x))}
    for compress in WAYS:
        for verb, run in _verbs(compress, x, spans).items():
            timed[notation.show(compress), verb] = _timed(run)
    measured = interleave({f"{way} {verb}": run for (way, verb), run in timed.items()}, asked.repeats)
    spread = {key: Spread.of([1e9 * s / numel for s in seconds]) for key, seconds in measured.items()}
    print(f"{numel} numbers of fp32, CPU nanoseconds per number: median (quartiles)")
    print(f"copy {spread['copy ']}, add {spread['add ']}\n")
    print(f"{'':45} {'bits':>7}  {'encode':24} {'with feedback':24} {'decode':24}")
    rows = {}
    for compress in WAYS:
        name, weight = notation.show(compress), bits(compress, spans, numel) / numel
        verbs = {verb: spread[f"{name} {verb}"] for verb in ("encode", "encode_with_feedback", "decode")}
        print(f"{name:45} {weight:7.3f}  " + " ".join(f"{verbs[v]!s:24}" for v in verbs))
        rows[name] = {"bits": weight, **{verb: vars(figure) for verb, figure in verbs.items()}}
    if asked.json:
        plain = {key: vars(spread[f"{key} "]) for key in ("copy", "add")}
        asked.json.write_text(json.dumps({"numel": numel, **plain, "compressors": rows}, indent=1) + "\n")
    return 0


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    """CPU seconds of `run`, which has warmed up twice."""
    run()
    run()

    def timed() -> float:
        start = time.thread_time()
        run()
        return time.thread_time() - start

    return timed


def _copy(x: torch.Tensor) -> Callable[[], object]:
    out = torch.empty_like(x)
    return lambda: out.copy_(x)


def _add(x: torch.Tensor) -> Callable[[], object]:
    out = x.clone()
    return lambda: out.add_(x, alpha=0.5)


def _verbs(compress: Compressor, x: torch.Tensor, spans: tuple[Span, ...]) -> dict[str, Callable[[], object]]:
    dtype = compress.total_dtype(x.dtype)
    total = torch.empty(x.shape, dtype=dtype)
    compress.add(total, x, 1e-3, True)
    owing, memory = total.clone(), CompressorMemory()
    message = compress.encode(total, spans, CompressorMemory()).clone()

    def encode_with_feedback() -> None:
        compress.encode_with_feedback(owing, spans, memory)
        memory.commit()

    return {
        "encode": lambda: compress.encode(total, spans, CompressorMemory()),
        "encode_with_feedback": encode_with_feedback,
        "decode": lambda: compress.decode(message, spans, x.numel(), dtype),
    }


if __name__ == "__main__":
    raise SystemExit(main())
