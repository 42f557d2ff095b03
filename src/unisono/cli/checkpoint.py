"""``unisono checkpoint``: shows, verifies and converts checkpoints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.argument_words import option_table, read_options, single_argument
from unisono.errors import CheckpointDamaged, InvalidInput, UnisonoError, printable
from unisono.notation import nearest

if TYPE_CHECKING:
    from unisono.checkpoint import OpenedCheckpoint
    from unisono.checkpoint.tensor_stream import TensorSource

USAGE = """\
usage: unisono checkpoint show DIR
       unisono checkpoint verify DIR
       unisono checkpoint convert DIR --to FILE.safetensors [--all] [--max-shard-bytes SIZE]
       unisono checkpoint convert --from FILE.safetensors DIR [--all]

Show, verify and convert checkpoints. DIR is a run directory, a directory of checkpoints, or one checkpoint; of several,
the newest is used (verify: all).

  show     print the step, what has written the checkpoint, and every tensor
  verify   read all data and compare all checksums; the exit code is 1 if anything is damaged
  convert  write a safetensors file, or read one and write a checkpoint to a new DIR; one tensor at a time, so the model
           need not fit in memory

  --to FILE               the safetensors file to write
  --from FILE             a safetensors file, an index, or a directory with model.safetensors or its index
  --all                   convert everything, also optimizer state, by the names in the checkpoint [weights only, by the
                          model's names]
  --max-shard-bytes SIZE  write several files of at most SIZE (5GB, 500MB) with an index, as transformers reads them
"""
_METADATA = "unisono"  # key in a file's metadata: step and meta of the checkpoint
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def checkpoint(words: list[str]) -> int:
    """Run ``unisono checkpoint`` with the arguments `words`; 1 if ``verify`` finds damage, otherwise 0.

    Raises:
        UnisonoError: the arguments are invalid, or the checkpoint is damaged.
    """
    if not words or "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    verbs = {"show": _show, "verify": _verify, "convert": _convert}
    if words[0] not in verbs:
        raise InvalidInput("checkpoint", words[0], "there is no such subcommand", nearest(words[0], list(verbs)))
    options, rest = read_options(words[1:], option_table(USAGE) if words[0] == "convert" else {})
    directory = Path(single_argument(rest, "DIR", "directory", f"write unisono checkpoint {words[0]} DIR"))
    try:
        return verbs[words[0]](directory, options)
    except BrokenPipeError:  # the reader of the output has exited: handled by the main command
        raise
    except OSError as error:
        raise UnisonoError(f"{error.filename or directory}: {error.strerror or error}") from error


def _show(directory: Path, options: Mapping[str, str]) -> int:
    from unisono.checkpoint.listing import contents

    print("\n".join(contents(_newest(directory))))
    return 0


def _verify(directory: Path, options: Mapping[str, str]) -> int:
    from unisono.checkpoint import damages, open_checkpoint
    from unisono.checkpoint.locate import find_checkpoints

    damaged = _latest_is_damaged(directory)
    for path in find_checkpoints(directory, "DIR"):
        problems = [printable(problem) for problem in damages(path)]
        if problems:
            print(f"{path}: damaged\n" + "\n".join(f"  {problem}" for problem in problems))
        else:
            opened = open_checkpoint(path)
            nbytes = sum(part.nbytes for part in opened.parts)
            print(f"{path}: sound, step {opened.step}, {len(opened.specs)} tensors, {nbytes:,} bytes")
        damaged |= bool(problems)
    return int(damaged)


def _convert(directory: Path, options: Mapping[str, str]) -> int:
    if ("--to" in options) == ("--from" in options):
        raise InvalidInput("convert", str(directory), "either --to or --from is needed", "write --to model.safetensors")
    return (convert if "--to" in options else _import)(directory, options)


def convert(directory: Path, options: Mapping[str, str]) -> int:
    """Write a checkpoint to the safetensors file ``options["--to"]``; returns 0.

    Raises:
        InvalidInput: the name is not that of a safetensors file, or the file exists.
        OSError: the file cannot be written.
    """
    from unisono.checkpoint import save_plain
    from unisono.checkpoint.plain_safetensors import INDEX
    from unisono.checkpoint.tensor_stream import Renamed
    from unisono.checkpoint.weights import weights_in

    path, max_bytes = Path(options["--to"]), shard_bytes(options)
    if path.suffix != ".safetensors":
        raise InvalidInput("--to", str(path), "not a safetensors file", "write for instance --to model.safetensors")
    if not path.parent.is_dir():
        raise InvalidInput("--to", str(path), f"there is no directory {path.parent}", "make it, or name another file")
    if existing := [file for file in (path, path.with_name(path.name + INDEX)) if file.exists()]:
        raise InvalidInput("--to", str(path), f"{existing[0]} exists already", "name another file, or remove it")
    opened = _newest(directory)
    if "--all" in options:
        metadata = json.dumps({"step": opened.step, "meta": opened.meta})
        files = save_plain(opened, path, max_bytes, {_METADATA: metadata})
    else:
        files = save_plain(Renamed(opened, weights_in(opened)), path, max_bytes)
    print("\n".join(map(str, files)))
    return 0


def _import(directory: Path, options: Mapping[str, str]) -> int:
    from unisono.checkpoint import open_plain, store
    from unisono.checkpoint.tensor_stream import Renamed
    from unisono.checkpoint.weights import WEIGHTS

    if "--max-shard-bytes" in options:
        raise InvalidInput(
            "--max-shard-bytes", options["--max-shard-bytes"], "a checkpoint is one file", "leave it out"
        )
    path = Path(options["--from"])
    if not path.exists():
        raise InvalidInput("--from", str(path), "there is no such file", "check the path")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidInput("DIR", str(directory), "it exists already", "name a new directory")
    plain = open_plain(path)
    step, meta, has_all = _read_metadata(plain.metadata, path)
    source: TensorSource = plain
    if "--all" not in options:
        prefix = WEIGHTS if has_all else ""
        names = [name.removeprefix(prefix) for name in plain.specs if name.startswith(prefix)]
        source = Renamed(plain, {WEIGHTS + name: prefix + name for name in names})
    print(store(source, directory, step, meta))
    return 0


def _read_metadata(metadata: Mapping[str, str], path: Path) -> tuple[int, Any, bool]:
    """Step and meta of the checkpoint that was converted to the file at `path`, and whether that was with --all.

    Without --all, the file does not contain them: the step is then 0.
    """
    if _METADATA not in metadata:
        return 0, {"converted_from": path.name}, False
    try:
        fields = json.loads(metadata[_METADATA])
        step, meta = fields["step"], fields["meta"]
        if type(step) is not int or not 0 <= step < 10**18:
            raise ValueError(step)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointDamaged(f"{path}: its metadata is not what unisono checkpoint convert --all writes") from None
    return step, meta, True


def shard_bytes(options: Mapping[str, str]) -> int | None:
    """``--max-shard-bytes`` in bytes; None if it is not given.

    Raises:
        InvalidInput: the value is not a size.
    """
    text = options.get("--max-shard-bytes")
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15})\s*([kKMGT]?B?)", text, re.ASCII)
    size = int(match[1]) * _UNITS.get(match[2].upper().removesuffix("B") + "B", 1) if match else 0
    if size < 1:
        raise InvalidInput("--max-shard-bytes", text, "not a size of at least one byte", "write for instance 5GB")
    return size


def _newest(directory: Path) -> OpenedCheckpoint:
    from unisono.checkpoint.locate import open_found

    return open_found(directory, "DIR", lambda damage: print(printable(f"damaged: {damage}"), file=sys.stderr))


def _latest_is_damaged(directory: Path) -> bool:
    from unisono.checkpoint.directory import read_latest
    from unisono.checkpoint.locate import checkpoints_directory, find_checkpoints

    if find_checkpoints(directory, "DIR") == [directory]:
        return False
    try:
        read_latest(checkpoints_directory(directory))
    except CheckpointDamaged as damage:
        print(printable(str(damage)))
        return True
    return False
