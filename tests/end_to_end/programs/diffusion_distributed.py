"""Denoising diffusion of points on a spiral, sampled with an average of the weights."""

import json

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()
torch.manual_seed(0)

TIMESTEPS, BATCH_SIZE, ITERATIONS = 30, 64, 200


def spiral(count):
    turn = 3 * torch.pi * torch.rand(count).sqrt()
    return torch.stack([turn * turn.cos(), turn * turn.sin()], 1) / 6 + 0.03 * torch.randn(count, 2)


class Denoiser(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, width)
        self.into = nn.Linear(2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        x = self.into(x) + self.time(t)
        for layer in self.layers:
            x = x + layer(nn.functional.silu(x))
        return self.out(x)


beta = torch.linspace(1e-3, 0.2, TIMESTEPS)
alpha_bar = (1 - beta).cumprod(0)

model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = world.bind(model, optimizer)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=ITERATIONS)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))

for _ in range(ITERATIONS):
    x0, noise, t = spiral(BATCH_SIZE), torch.randn(BATCH_SIZE, 2), torch.randint(TIMESTEPS, (BATCH_SIZE,))
    noisy = alpha_bar[t, None].sqrt() * x0 + (1 - alpha_bar[t, None]).sqrt() * noise
    noisy, noise, t = (each[world.rank :: world.size] for each in (noisy, noise, t))
    loss = nn.functional.mse_loss(model(noisy, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    ema.update_parameters(model)


@torch.no_grad()
def sample(net, count):
    x = torch.randn(count, 2)
    for t in reversed(range(TIMESTEPS)):
        predicted = net(x, torch.full((count,), t))
        x = (x - beta[t] / (1 - alpha_bar[t]).sqrt() * predicted) / (1 - beta[t]).sqrt()
        if t:
            x = x + beta[t].sqrt() * torch.randn(count, 2)
    return x


points = sample(ema, 200)
radius = points.norm(dim=1).mean().item()
print(f"mean radius {radius:.4f}, of the data {spiral(200).norm(dim=1).mean().item():.4f}")
print("digest", json.dumps({"radius": radius, "lr": scheduler.get_last_lr()[0]}))
