"""Checkpoints that another program has overwritten, and how the command reacts to them."""

from __future__ import annotations

import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TRACE = "/tmp/unisono-hostile-file-command"
MOST_BYTES, MOST_SECONDS = 2 << 30, 60


class Attack:
    """What one author of files does to a checkpoint.

    Args:
        directory: a checkpoint.
        seed: of all choices.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._manifest = directory / "manifest.json"
        self._any = self._random.choice(sorted(path for path in directory.iterdir() if path.is_file()))

    def truncate(self) -> None:
        """A file ends too early."""
        os.truncate(self._any, self._random.randrange(self._any.stat().st_size))

    def flip(self) -> None:
        """A bit is another one."""
        at = self._random.randrange(self._any.stat().st_size)
        said = bytearray(self._any.read_bytes())
        said[at] ^= 1 << self._random.randrange(8)
        self._any.write_bytes(said)

    def claim(self) -> None:
        """A number of the manifest, such as a size, is one that no machine can hold."""
        text = self._manifest.read_text()
        found = self._random.choice(list(re.finditer(r"\d+", text)))
        self._manifest.write_text(text[: found.start()] + "9" * 18 + text[found.end() :])

    def nest(self) -> None:
        """The manifest is deeper than any parser's stack."""
        self._manifest.write_text("[" * 200_000)

    def pickled(self) -> None:
        """A file is a pickle that runs a command."""
        self._any.write_bytes(pickle.dumps(_Runs()))

    def header(self) -> None:
        """The length of a part's header is a claim that nothing bears out."""
        part = next(self._manifest.parent.glob("*.safetensors"))
        part.write_bytes((2**62).to_bytes(8, "little") + part.read_bytes()[8:])

    def elsewhere(self) -> None:
        """A file is a link to another one."""
        self._any.unlink()
        self._any.symlink_to("/etc/passwd")

    def pipe(self) -> None:
        """A file is a pipe that nobody writes to."""
        self._any.unlink()
        os.mkfifo(self._any)

    def device(self) -> None:
        """A file is a link to one that does not end."""
        self._any.unlink()
        self._any.symlink_to("/dev/zero")

    def directory(self) -> None:
        """A file is a directory."""
        self._any.unlink()
        self._any.mkdir()


WAYS: tuple[Callable[[Attack], None], ...] = (
    *(Attack.truncate, Attack.flip, Attack.claim, Attack.nest, Attack.pickled),
    *(Attack.header, Attack.elsewhere, Attack.pipe, Attack.device, Attack.directory),
)


class _Runs:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {TRACE}",)


def attack(run: Path, work: Path, count: int) -> list[str]:
    """What went wrong when `count` copies of the newest checkpoint of `run` were written over, each in one of `WAYS` in
    turn, and verified and exported. Each command is to end in words, with little memory and in little time."""
    Path(TRACE).unlink(missing_ok=True)
    newest = max((run / "checkpoints").glob("step-*"))
    wrong = []
    for seed in range(count):
        way = WAYS[seed % len(WAYS)]
        copy = work / f"hostile-{seed}" / newest.name
        shutil.copytree(newest, copy)
        way(Attack(copy, seed))
        for words in (["verify", copy], ["convert", copy, "--to", work / "out.safetensors", "--all"]):
            problem = _problem(["checkpoint", *map(str, words)])
            if problem:
                wrong.append(f"checkpoint {words[0]} after {way.__name__} (seed {seed}): {problem}")
        shutil.rmtree(copy.parent)
    if Path(TRACE).exists():
        wrong.append("a file had a command run")
    return wrong


def _problem(words: list[str]) -> str:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    command = [sys.executable, "-m", "unisono", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it had not ended after {MOST_SECONDS} s"
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if done.returncode not in (1, 2):
        return f"exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
    if "Traceback" in done.stderr:
        return f"a traceback: {done.stderr[-500:]}"
    if most > MOST_BYTES and most > before * 1024:
        return f"it took {most} bytes"
    return ""
