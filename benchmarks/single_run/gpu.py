"""Tokens per second of a GPT of 120M and of 1B parameters on one GPU, against a plain loop and a transformers Trainer.

All three use bf16 autocast, ``torch.compile``, torch's fused attention kernel and fused AdamW
(`scripts/single_gpu.py`). Next to each rate stands the model FLOPs utilization: 6 operations per parameter and token,
plus 12 * layers * width * context for attention (Chowdhery et al. 2022, "PaLM", appendix B). ``--tiny`` runs everything
on the CPU with a tiny model, to check that the benchmark works; it judges nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Mapping, Sequence

import torch

from benchmarks import harness
from benchmarks.harness import BIN, SCRIPTS, Claim, Spread, Verdict

TARGETS = {"plain": 1.0, "trainer": 1.1}
PEER_NAMES = {"plain": "a plain loop", "trainer": "a transformers Trainer"}
BATCHES = {"120m": 32, "1b": 8, "tiny": 4}
PEAKS = {"H200": 989e12, "H100 80GB": 989e12, "A100": 312e12}  # dense bf16 operations per second, as makers give them


def ways() -> list[str]:
    """Ours, and the peers that are installed."""
    return ["unisono", "plain", *(["trainer"] if importlib.util.find_spec("accelerate") else [])]


def command(way: str, model: str, device: str, steps: int) -> list[str]:
    """One run of `scripts/single_gpu.py`."""
    options = [f"--model={model}", f"--device={device}", f"--batch={BATCHES[model]}", f"--steps={steps}"]
    compiled = ["--compile"] if device == "cuda" else []
    return [str(BIN / "python"), str(SCRIPTS / "single_gpu.py"), way, *options, *compiled]


def peak_of(device: str) -> float | None:
    """Operations per second of a device by its name; None where that is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def utilisation(report: Mapping[str, float], peak: float) -> float:
    """The share of `peak` operations per second that the model's own arithmetic takes."""
    return report["tokens_per_second"] * report["flops_per_token"] / peak


def measure(model: str, device: str, steps: int, asked: argparse.Namespace) -> list[Verdict]:
    """All ways, interleaved."""
    run = functools.partial(harness.run, timeout_seconds=900.0)
    ran = harness.interleave(
        {w: functools.partial(run, command(w, model, device, steps)) for w in ways()}, asked.repeats
    )
    reports = {way: [r.report for r in runs] for way, runs in ran.items()}
    peak = asked.peak_tflops * 1e12 if asked.peak_tflops else peak_of(reports["plain"][0]["device"])
    for way, found in reports.items():
        share = Spread.of([utilisation(r, peak) for r in found]) if peak else "not known"
        print(f"{model}, {way}: {Spread.of([r['tokens_per_second'] for r in found])} tokens/s, of the peak: {share}")
    rates = {way: [r["tokens_per_second"] for r in found] for way, found in reports.items()}
    return [
        Verdict(Claim(f"GPT {model} on {reports['plain'][0]['device']}: tokens/s", TARGETS[peer]), PEER_NAMES[peer],
                "tokens/s", rates["unisono"], rates[peer])
        for peer in rates if peer != "unisono"]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--tiny", action="store_true", help="a model of nothing, on the CPU; judges nothing")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--peak-tflops", type=float, help="of the device in bf16, where its name is not known here")
    asked = parser.parse_args(arguments)
    if not asked.tiny and not torch.cuda.is_available():
        print("not measured: there is no GPU here")
        return 0
    if "trainer" not in ways():
        print("not measured against a transformers Trainer: it needs accelerate (pip install accelerate)")
    if asked.tiny:
        print(harness.table(measure("tiny", "cpu", 8, asked)))
        return 0
    verdicts = [verdict for model in ("120m", "1b") for verdict in measure(model, "cuda", asked.steps, asked)]
    return harness.conclude("gpu", verdicts, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
