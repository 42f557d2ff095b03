"""Transfers state between workers' memories, from the workers that have it to those that lack it."""

from unisono.elastic.transfer.average import differing as differing
from unisono.elastic.transfer.average import mean as mean
from unisono.elastic.transfer.average import mean_of as mean_of
from unisono.elastic.transfer.digest import state_digest as state_digest
from unisono.elastic.transfer.local_tensors import LocalTensors as LocalTensors
from unisono.elastic.transfer.memory_checkpoint import MemoryCheckpoint as MemoryCheckpoint
from unisono.elastic.transfer.memory_checkpoint import MemoryCheckpoints as MemoryCheckpoints
from unisono.elastic.transfer.memory_checkpoint import newest as newest
from unisono.elastic.transfer.route import Route as Route
from unisono.elastic.transfer.transfer import transfer_tensors as transfer_tensors
