"""Checkpoints on disk, readable by any number of workers: safetensors and JSON, no pickles."""

from unisono.checkpoint.async_writer import Event, WriteProgress, Writer, WriteStatus
from unisono.checkpoint.convert import save_plain, store
from unisono.checkpoint.directory import checkpoints
from unisono.checkpoint.fingerprint import checksum, fingerprint, fingerprint_of
from unisono.checkpoint.load import newest, open_newest
from unisono.checkpoint.locate import checkpoints_directory, open_found
from unisono.checkpoint.model_match import compare
from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint, open_checkpoint
from unisono.checkpoint.ownership import TensorShard, decode_shards, encode_shards, shards_of
from unisono.checkpoint.plain_safetensors import PlainSafetensors, open_plain
from unisono.checkpoint.safetensors_format import Spec
from unisono.checkpoint.verify import damages, verified
from unisono.checkpoint.weights import read_weights
from unisono.checkpoint.write_plan import plan_replicated_writes
from unisono.tensors.box import Box

__all__ = [
    "Box",
    "Event",
    "OpenedCheckpoint",
    "PlainSafetensors",
    "Spec",
    "TensorShard",
    "WriteProgress",
    "WriteStatus",
    "Writer",
    "checkpoints",
    "checkpoints_directory",
    "checksum",
    "compare",
    "damages",
    "decode_shards",
    "encode_shards",
    "fingerprint",
    "fingerprint_of",
    "newest",
    "open_checkpoint",
    "open_found",
    "open_newest",
    "open_plain",
    "plan_replicated_writes",
    "read_weights",
    "save_plain",
    "shards_of",
    "store",
    "verified",
]
