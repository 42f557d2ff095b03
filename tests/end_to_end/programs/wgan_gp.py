"""A Wasserstein GAN with gradient penalty, on a ring of Gaussians."""

import json
import math

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

LAMBDA, CRITIC_ITERS, BATCH_SIZE, ITERATIONS = 0.1, 3, 64, 60


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def real_samples(count):
    angle = torch.randint(8, (count,)) * (2 * math.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(count, 2)


def calc_gradient_penalty(critic, real, fake, alpha):
    between = (alpha * real + (1 - alpha) * fake).requires_grad_()
    gradients = torch.autograd.grad(
        outputs=critic(between).sum(), inputs=between, create_graph=True, retain_graph=True
    )[0]
    return LAMBDA * ((gradients.norm(2, dim=1) - 1) ** 2).mean()


generator, critic = net(2, 2), net(2, 1)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

for _ in range(ITERATIONS):
    for p in critic.parameters():
        p.requires_grad = True
    for _ in range(CRITIC_ITERS):
        batch = torch.cat([real_samples(BATCH_SIZE), torch.randn(BATCH_SIZE, 2), torch.rand(BATCH_SIZE, 1)], 1)
        real, noise, alpha = batch.split([2, 2, 1], 1)
        with torch.no_grad():
            fake = generator(noise)
        optimizer_c.zero_grad()
        loss_c = critic(fake).mean() - critic(real).mean() + calc_gradient_penalty(critic, real, fake, alpha)
        loss_c.backward()
        optimizer_c.step()
    for p in critic.parameters():
        p.requires_grad = False
    noise = torch.randn(BATCH_SIZE, 2)
    optimizer_g.zero_grad()
    loss_g = -critic(generator(noise)).mean()
    loss_g.backward()
    optimizer_g.step()

with torch.no_grad():
    real, fake = real_samples(500), generator(torch.randn(500, 2))
    distance = (critic(real).mean() - critic(fake).mean()).item()
print(f"estimated distance {distance:.4f}")
print("digest", json.dumps({"distance": distance, "radius": fake.norm(dim=1).mean().item()}))
