"""A U-Net that separates discs from a noisy background."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()
torch.manual_seed(0)
SIDE = 16


def discs(count):
    """Noisy images ``[count, 1, SIDE, SIDE]`` with one disc each, and their masks."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    centre, radius = torch.randint(4, SIDE - 4, (count, 2, 1, 1)), torch.randint(2, 5, (count, 1, 1))
    mask = (rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 <= radius**2
    mask = mask[:, None].to(torch.float64)
    return mask + 0.5 * torch.randn_like(mask), mask


class DoubleConv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.down1, self.down2 = DoubleConv(1, width), DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.conv2 = DoubleConv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.conv1 = DoubleConv(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        x = self.bottom(nn.functional.max_pool2d(second, 2))
        x = self.conv2(torch.cat([second, self.up2(x)], 1))
        return self.out(self.conv1(torch.cat([first, self.up1(x)], 1)))


def dice_loss(logits, mask):
    chance = logits.sigmoid()
    overlap = (chance * mask).sum((1, 2, 3))
    return (1 - (2 * overlap + 1) / (chance.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


train_loader = DataLoader(TensorDataset(*discs(96)), batch_size=16, shuffle=True)
test_images, test_masks = discs(32)
model = UNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.5)
model, optimizer = world.bind(model, optimizer)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", patience=0)

for epoch in range(3):
    model.train()
    for images, masks in train_loader:
        images, masks = images[world.rank :: world.size], masks[world.rank :: world.size]
        logits = model(images)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, masks) + dice_loss(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        score = dice_loss(model(test_images), test_masks).item()
    scheduler.step(score)
    print(f"epoch {epoch}: dice loss {score:.4f}")

print("digest", json.dumps({"dice": score, "lr": optimizer.param_groups[0]["lr"]}))
