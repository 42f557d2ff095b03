"""Stands here so that pytest finds the package ``tests`` from wherever it is started."""

import torch

# Small products of matrices on more threads wait for a free core each time, which on a busy machine takes longer than
# the product.
torch.set_num_threads(1)
