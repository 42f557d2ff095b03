"""Settings of all tests; pytest finds the package ``tests`` by this file."""

import signal
from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.short_form import short_form

# The parent of the tests may ignore signals, as nohup does, and a script that starts them in the background. Commands
# that tests start would inherit that. A handler is not inherited, and ignores the signal as well.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# On a busy machine, small matrix products on several threads wait for free cores longer than they compute.
torch.set_num_threads(1)

# Tests do not depend on the duration of examples, because other processes may load the machine.
settings.register_profile("unisono", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unisono")


@pytest.hookimpl(tryfirst=True)  # before rows are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all rows but n of a table with ``short(n)`` as ``long``."""
    tables = defaultdict(list)
    for item in items:
        if item.get_closest_marker("short"):
            tables[item.nodeid.partition("[")[0]].append(item)
    for rows in tables.values():
        (most,) = rows[0].get_closest_marker("short").args
        kept = short_form([row.callspec.indices for row in rows], most)
        for number, row in enumerate(rows):
            if number not in kept:
                row.add_marker(pytest.mark.long)
