"""A variational autoencoder of handwritten digits."""

import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.mean = nn.Linear(32, 4)
        self.log_variance = nn.Linear(32, 4)
        self.fc2 = nn.Linear(4, 32)
        self.fc3 = nn.Linear(32, 64)

    def encode(self, x):
        hidden = F.relu(self.fc1(x))
        return self.mean(hidden), self.log_variance(hidden)

    def decode(self, z):
        return torch.sigmoid(self.fc3(F.relu(self.fc2(z))))

    def forward(self, x, noise):
        mean, log_variance = self.encode(x)
        return self.decode(mean + noise * torch.exp(log_variance / 2)), mean, log_variance


def loss_function(output, x):
    reconstruction, mean, log_variance = output
    likelihood = F.binary_cross_entropy(reconstruction, x, reduction="none").sum(1)
    divergence = -0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp(), dim=1)
    return (likelihood + divergence).mean()


torch.manual_seed(1)
data = torch.tensor(load_digits().images / 16.0).flatten(1)
train_loader = DataLoader(data[:1200], batch_size=60, shuffle=True)
test_data = data[1200:]

model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(5):
    model.train()
    for x in train_loader:
        noise = torch.randn(len(x), 4)
        optimizer.zero_grad()
        loss = loss_function(model(x, noise), x)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        test_loss = loss_function(model(test_data, torch.zeros(len(test_data), 4)), test_data).item()
    print(f"epoch {epoch}: test loss {test_loss:.4f}")

print("digest", json.dumps({"loss": test_loss, "first weight": model.fc1.weight[0, 10].item()}))
