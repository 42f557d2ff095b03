"""A training loop of one's own that goes on where it was stopped, on any number of workers."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import unisono
from custom_task import points
from unisono.checkpoint import fingerprint

directory, steps = sys.argv[1], int(sys.argv[2])
world = unisono.join(threads=1)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).to(world.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = world.bind(model, optimizer, compress=unisono.Exact())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
world.register_state("scheduler", scheduler)
world.load(directory)  # the newest checkpoint, if there is one

for batches in world.steps(points(3000, seed=0), global_batch=60, steps=steps):  # from the step after it
    optimizer.zero_grad()
    for x, y in batches:
        F.cross_entropy(model(x.to(world.device)), y.to(world.device)).backward()
    optimizer.step()
    scheduler.step()
    if (batches.step + 1) % 20 == 0:
        world.save(directory)  # all workers call it alike

if world.rank == 0:
    print(f"weights {fingerprint(model.state_dict())}")
world.close()
