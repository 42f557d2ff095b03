"""The durable format of a run's state, independent of the number of workers: safetensors and JSON, no pickles."""

from unisono.checkpoint.async_writer import Event, WriteProgress, Writer, WriteStatus
from unisono.checkpoint.convert import save_plain, store
from unisono.checkpoint.directory import checkpoints
from unisono.checkpoint.fingerprint import digest, fingerprint, fingerprint_of
from unisono.checkpoint.load import newest, open_newest
from unisono.checkpoint.locate import home, open_found
from unisono.checkpoint.model_match import compare
from unisono.checkpoint.opened_checkpoint import Opened, open_checkpoint
from unisono.checkpoint.ownership import TensorShard, decode_holding, encode_holding, holding
from unisono.checkpoint.plain_safetensors import Plain, open_plain
from unisono.checkpoint.safetensors_format import Spec
from unisono.checkpoint.verify import damages, verified
from unisono.checkpoint.weights import read_weights
from unisono.checkpoint.write_plan import share_out
from unisono.tensors.box import Box

__all__ = [
    "Box",
    "Event",
    "Opened",
    "Plain",
    "Spec",
    "TensorShard",
    "WriteProgress",
    "WriteStatus",
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
