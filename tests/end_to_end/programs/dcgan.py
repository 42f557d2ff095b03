"""A convolutional generative adversarial network of handwritten digits."""

import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)
torch.manual_seed(999)

nz, ngf, ndf = 8, 8, 8
images = torch.tensor(load_digits().images / 8.0 - 1.0)[:600, None]
dataloader = DataLoader(images, batch_size=30, shuffle=True)


def weights_init(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.1)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, 2 * ngf, 2, 1, 0),
    nn.ReLU(True),
    nn.ConvTranspose2d(2 * ngf, ngf, 4, 2, 1),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf, 1, 4, 2, 1),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, 2 * ndf, 4, 2, 1),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(2 * ndf, 1, 2, 1, 0),
    nn.Flatten(0),
)
netG.apply(weights_init)
netD.apply(weights_init)

criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(16, nz, 1, 1)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

for epoch in range(3):
    for real in dataloader:
        noise = torch.randn(len(real), nz, 1, 1)
        # Update D: all-real batch, then all-fake batch.
        netD.zero_grad()
        label = torch.ones(len(real))
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros_like(label))
        errD_fake.backward()
        optimizerD.step()
        # Update G: fake labels are real for its cost.
        netG.zero_grad()
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
    with torch.no_grad():
        quality = netD(netG(fixed_noise)).mean().item()
    print(f"epoch {epoch}: D finds fixed samples real by {quality:.4f}")

digest = {"quality": quality, "D": sum(p.abs().sum().item() for p in netD.parameters())}
print("digest", json.dumps(digest))
