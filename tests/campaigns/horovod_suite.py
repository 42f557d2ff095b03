"""Horovod's own tests of its PyTorch interface, on `unisono.horovod`:

    unisono launch --workers 2 --no-elastic tests/campaigns/horovod_suite.py PATH/test/parallel/test_torch.py

``--without-muon`` leaves out an optimizer that is newer than these tests, which give biases to every one.
"""

from __future__ import annotations

import os
import sys
import types
import unittest.mock

import pytest
import torch

import unisono.horovod as hvd
from unisono.launch import current_identity


def pretend_to_be_horovod() -> None:
    """Modules and variables under which the tests look for Horovod and their own utilities."""
    who = current_identity()
    os.environ |= {"HOROVOD_RANK": str(who.rank), "HOROVOD_SIZE": str(who.size)}
    package, threads = types.ModuleType("horovod"), types.ModuleType("horovod.runner.util.threads")
    package.__dict__.update(__path__=[], torch=hvd)
    threads.__dict__.update(in_thread=None)  # imported by the utilities, and called by other tests
    runner = {name: types.ModuleType(name) for name in ("horovod.runner", "horovod.runner.util")}
    sys.modules |= {"horovod": package, "horovod.torch": hvd, threads.__name__: threads, **runner}
    sys.modules["mock"] = unittest.mock


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--without-muon"]
    if len(arguments) < len(sys.argv) - 1:
        torch.optim.Muon.__module__ = "left_out"
    pretend_to_be_horovod()
    sys.exit(pytest.main(["-q", "-rA", "-c", os.devnull, "-p", "no:cacheprovider", "--timeout=120", *arguments]))
