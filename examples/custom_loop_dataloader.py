"""A loop that loads its own data: nothing is added but the two lines, and the share of each worker."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import unisono
from custom_task import points

world = unisono.join()

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3)).to(world.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = world.bind(model, optimizer)

data = points(3000, seed=0)
sampler = DistributedSampler(data, num_replicas=world.size, rank=world.rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=60 // world.size, sampler=sampler):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(world.device)), y.to(world.device))
        loss.backward()
        optimizer.step()  # of the mean over all workers
    mean = world.mean(loss.item())
    if world.rank == 0:
        print(f"epoch {epoch}  loss {mean:.4f}")
world.close()
