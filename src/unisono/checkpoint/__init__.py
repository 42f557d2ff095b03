"""The run written down, independent of how many workers wrote it. Safetensors and JSON; nothing is
unpickled."""

from unisono.checkpoint.box import Box
from unisono.checkpoint.compare import compare
from unisono.checkpoint.container import Spec
from unisono.checkpoint.convert import save_plain, store
from unisono.checkpoint.directory import checkpoints
from unisono.checkpoint.find import home, open_found
from unisono.checkpoint.fingerprint import digest, fingerprint, fingerprint_of
from unisono.checkpoint.holding import Piece, decode_holding, encode_holding, holding
from unisono.checkpoint.opened import Opened, open_checkpoint
from unisono.checkpoint.plain import Plain, open_plain
from unisono.checkpoint.reader import newest, open_newest
from unisono.checkpoint.share import share_out
from unisono.checkpoint.verify import damages, verified
from unisono.checkpoint.weights import read_weights
from unisono.checkpoint.writer import Event, Phase, Progress, Writer

__all__ = [
    "Box",
    "Event",
    "Opened",
    "Phase",
    "Piece",
    "Plain",
    "Progress",
    "Spec",
    "Writer",
    "checkpoints",
    "compare",
    "damages",
    "decode_holding",
    "digest",
    "encode_holding",
    "fingerprint",
    "fingerprint_of",
    "holding",
    "home",
    "newest",
    "open_checkpoint",
    "open_found",
    "open_newest",
    "open_plain",
    "read_weights",
    "save_plain",
    "share_out",
    "store",
    "verified",
]
