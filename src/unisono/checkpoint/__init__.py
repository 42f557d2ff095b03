"""The run written down, independent of how many workers wrote it. Safetensors and JSON; nothing is
unpickled."""

from unisono.checkpoint.compare import compare
from unisono.checkpoint.directory import checkpoints
from unisono.checkpoint.fingerprint import fingerprint
from unisono.checkpoint.reader import Loaded, load, load_newest
from unisono.checkpoint.share import share_out
from unisono.checkpoint.writer import Event, Phase, Progress, Writer

__all__ = [
    "Event",
    "Loaded",
    "Phase",
    "Progress",
    "Writer",
    "checkpoints",
    "compare",
    "fingerprint",
    "load",
    "load_newest",
    "share_out",
]
