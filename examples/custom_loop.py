"""A training loop of one's own, on any number of workers."""

import torch
from torch import nn
from torch.nn import functional as F

import unisono
from custom_task import points
from unisono.checkpoint import fingerprint

world = unisono.join(threads=1)

torch.manual_seed(0)
data = points(3000, seed=0)
model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).to(world.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = world.bind(model, optimizer, compress=unisono.Exact(), clip=1.0)

for batches in world.steps(data, global_batch=60, epochs=2):
    optimizer.zero_grad()
    losses = []
    for x, y in batches:  # the micro-batches of this worker
        loss = F.cross_entropy(model(x.to(world.device)), y.to(world.device))
        loss.backward()
        losses.append(loss.item())
    optimizer.step()  # of the mean over the global batch
    mean = world.mean(sum(losses) / len(losses), weight=len(losses))
    if batches.step % 20 == 0 and world.rank == 0:
        print(f"step {batches.step}  loss {mean:.4f}")

if world.rank == 0:
    print(f"loss {mean:.4f}  weights {fingerprint(model.state_dict())}")
world.close()
