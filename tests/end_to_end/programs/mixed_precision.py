"""Mixed precision with gradient scaling, accumulation and clipping; autocast only where the device has it."""

import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

use_amp = torch.cuda.is_available()
iters_to_accumulate, epochs = 2, 3


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv2(torch.relu(self.conv1(x)))))


net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), ResidualBlock(8), nn.MaxPool2d(2), ResidualBlock(8),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
)  # fmt: skip
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
loss_fn = nn.CrossEntropyLoss()

digits = load_digits()
images, labels = torch.tensor(digits.images / 16.0)[:, None], torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images[:640], labels[:640]), batch_size=32, shuffle=True)

for epoch in range(epochs):
    net.train()
    for i, (inputs, targets) in enumerate(loader):
        with torch.autocast("cuda", enabled=use_amp):
            loss = loss_fn(net(inputs), targets) / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    net.eval()
    with torch.no_grad():
        test_loss = loss_fn(net(images[640:900]), labels[640:900]).item()
    print(f"epoch {epoch}: test loss {test_loss:.4f}, scale {scaler.get_scale():.0f}")

print("digest", json.dumps({"loss": test_loss, "scale": scaler.get_scale()}))
