"""A siamese network that says whether two handwritten digits are the same."""

import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()


class Pairs(Dataset):
    """Pairs of images, half of them of one digit."""

    def __init__(self, images, labels, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images, self.labels = images, labels
        self.partner = []
        for place, label in enumerate(labels.tolist()):
            candidates = (labels == label if place % 2 else labels != label).nonzero().flatten()
            self.partner.append(candidates[torch.randint(len(candidates), (1,), generator=generator)].item())

    def __len__(self):
        return len(self.images)

    def __getitem__(self, place):
        other = self.partner[place]
        same = (self.labels[place] == self.labels[other]).to(torch.float64)
        return self.images[place], self.images[other], same


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 16), nn.LayerNorm(16)
        )
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, first, second):
        return self.fc(torch.cat([self.body(first), self.body(second)], 1)).squeeze(1)


torch.manual_seed(1)
digits = load_digits()
images, labels = torch.tensor(digits.images / 16.0)[:, None], torch.tensor(digits.target)
train_loader = DataLoader(Pairs(images[:600], labels[:600], 0), batch_size=30, shuffle=True)
test_loader = DataLoader(Pairs(images[600:900], labels[600:900], 1), batch_size=100)

model = SiameseNetwork()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
model, optimizer = world.bind(model, optimizer)

for epoch in range(4):
    model.train()
    for first, second, same in train_loader:
        first, second, same = (each[world.rank :: world.size] for each in (first, second, same))
        optimizer.zero_grad()
        loss = criterion(model(first, second), same)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [criterion(model(first, second), same).item() for first, second, same in test_loader]
    print(f"epoch {epoch}: test loss {sum(losses) / len(losses):.4f}")

print("digest", json.dumps({"loss": sum(losses) / len(losses)}))
