"""Stands here so that pytest finds the package ``tests`` from wherever it is started."""

import signal

import torch
from hypothesis import HealthCheck, settings

# Whoever started the tests may ignore signals, as nohup does and a script that starts them in the background; commands
# that tests start would inherit that, and ignore what tests send them. A handler is not inherited, and does as little.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# Small products of matrices on more threads wait for a free core each time, which on a busy machine takes longer than
# the product.
torch.set_num_threads(1)

# No law depends on how long an example takes: other processes may load the machine.
settings.register_profile("unisono", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unisono")
