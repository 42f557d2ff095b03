"""Handwritten digits, classified by a small convolutional network."""

import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        data, target = data[world.rank :: world.size], target[world.rank :: world.size]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, data, target):
    model.eval()
    with torch.no_grad():
        output = model(data)
    return F.cross_entropy(output, target).item(), (output.argmax(1) == target).double().mean().item()


def main():
    torch.manual_seed(1)
    digits = load_digits()
    x, y = torch.tensor(digits.images / 16.0)[:, None], torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[:800], y[:800]), batch_size=40, shuffle=True)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model, optimizer = world.bind(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(3):
        train(model, loader, optimizer)
        loss, accuracy = test(model, x[800:], y[800:])
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")
        scheduler.step()
    print("digest", json.dumps({"loss": loss, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
