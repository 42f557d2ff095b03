"""Stands here so that pytest finds the package ``tests`` from wherever it is started."""

import torch
from hypothesis import HealthCheck, settings

# Small products of matrices on more threads wait for a free core each time, which on a busy machine takes longer than
# the product.
torch.set_num_threads(1)

# No law depends on how long an example takes: other processes may load the machine.
settings.register_profile("unisono", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unisono")
