"""MXNet's KVStore interface: values by key, which workers push to and pull from."""

from unisono.kvstore.store import KVStore as KVStore
from unisono.kvstore.store_types import create as create
