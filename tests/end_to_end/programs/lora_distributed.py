"""Low-rank adapters: a network that knows even digits is taught all of them, with its weights frozen."""

import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()
torch.manual_seed(0)


class LoRALinear(nn.Module):
    """``y = W x + b + (alpha / r) B A x`` with W and b frozen."""

    def __init__(self, linear, r=4, alpha=8):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_A = nn.Parameter(0.1 * torch.randn(r, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r))
        self.scaling = alpha / r

    def forward(self, x):
        return self.linear(x) + self.scaling * (x @ self.lora_A.t() @ self.lora_B.t())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 10)

    def forward(self, x):
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))


def add_adapters(model):
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRALinear(child))


def fit(model, optimizer, data, epochs):
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=40, shuffle=True):
            x, y = x[world.rank :: world.size], y[world.rank :: world.size]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def loss_on(model, data):
    with torch.no_grad():
        return F.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()


digits = load_digits()
x, y = torch.tensor(digits.data / 16.0), torch.tensor(digits.target)
even = (y[:1200] % 2 == 0).nonzero().flatten()[:560]
some, everything, test = (
    TensorDataset(x[even], y[even]),
    TensorDataset(x[:800], y[:800]),
    TensorDataset(x[800:], y[800:]),
)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
model, optimizer = world.bind(model, optimizer)
fit(model, optimizer, some, epochs=4)
print(f"pretrained: {loss_on(model, test):.4f}")

add_adapters(model)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=5e-3)
model, optimizer = world.bind(model, optimizer)
print(f"{sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())} parameters train")
fit(model, optimizer, everything, epochs=3)
loss = loss_on(model, test)
print(f"adapted: {loss:.4f}")
print("digest", json.dumps({"loss": loss, "A": model.head.lora_A.abs().sum().item()}))
