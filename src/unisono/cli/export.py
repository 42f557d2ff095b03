"""``unisono export``: writes the trained weights of a run to one file, by the model's names."""

from __future__ import annotations

import os
from pathlib import Path

from unisono.cli.argument_words import option_table, read_options, single_argument
from unisono.cli.checkpoint import convert, shard_bytes
from unisono.errors import InvalidInput, UnisonoError

USAGE = """\
usage: unisono export RUN --to FILE.safetensors|FILE.pt [--max-shard-bytes SIZE]

Write the trained weights and buffers of RUN, by the names of the model's state_dict(). RUN is a run directory, a
directory of checkpoints, or one checkpoint; the newest sound checkpoint is exported.

  --to FILE               .safetensors, or .pt for torch.load and load_state_dict
  --max-shard-bytes SIZE  write several safetensors files of at most SIZE (5GB, 500MB) with an index, as transformers
                          reads them
"""


def export(words: list[str]) -> int:
    """Run ``unisono export`` with the arguments `words`; 0 when the file is written.

    Raises:
        UnisonoError: the arguments are invalid, or the checkpoint is damaged.
    """
    if not words or "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options, rest = read_options(words, option_table(USAGE))
    run = Path(single_argument(rest, "RUN", "run", "write unisono export RUN --to FILE"))
    if "--to" not in options:
        raise InvalidInput("--to", "(nothing)", "no file is named", "write for instance --to model.safetensors")
    path = Path(options["--to"])
    try:
        if path.suffix == ".safetensors":
            return convert(run, options)
        if path.suffix != ".pt":
            raise InvalidInput("--to", str(path), "neither .safetensors nor .pt", "write --to model.safetensors")
        if shard_bytes(options) is not None:
            raise InvalidInput(
                "--max-shard-bytes", options["--max-shard-bytes"], "a .pt file is not split", "leave it out"
            )
        _save(run, path)
    except OSError as error:
        raise UnisonoError(f"{error.filename or path}: {error.strerror or error}") from error
    print(path)
    return 0


def _save(run: Path, path: Path) -> None:
    """Write a file that ``torch.load(path, weights_only=True)`` reads. The file appears when it is complete."""
    import torch

    from unisono.run.spec import load
    from unisono.system.atomic_files import move, sync_directory

    if path.exists():
        raise InvalidInput("--to", str(path), "it exists already", "name another file, or remove it")
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            torch.save(load(run), file)
            file.flush()
            os.fsync(file.fileno())
        move(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)
