"""Matrix factorization of ratings, with sparse embeddings and an optimizer of their own."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

USERS, ITEMS, FACTORS, RATINGS = 60, 40, 4, 1600


def ratings():
    """Triples of user, item and rating, of a matrix of low rank with noise."""
    users, items = torch.randint(USERS, (RATINGS,)), torch.randint(ITEMS, (RATINGS,))
    true_users, true_items = torch.randn(USERS, FACTORS), torch.randn(ITEMS, FACTORS)
    score = (true_users[users] * true_items[items]).sum(1) + 0.1 * torch.randn(RATINGS)
    return users, items, score


class MatrixFactorization(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, 2 * FACTORS, sparse=True)
        self.item = nn.Embedding(ITEMS, 2 * FACTORS, sparse=True)
        self.mix = nn.Sequential(nn.Linear(2 * FACTORS, 16), nn.ReLU(), nn.Linear(16, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, users, items):
        product = self.user(users) * self.item(items)
        return product.sum(1) + self.mix(product).squeeze(1) + self.bias


users, items, scores = ratings()
loader = DataLoader(TensorDataset(users[:1400], items[:1400], scores[:1400]), batch_size=70, shuffle=True)

model = MatrixFactorization()
tables = [*model.user.parameters(), *model.item.parameters()]
sparse_optimizer = torch.optim.SparseAdam(tables, lr=2e-2)
dense_optimizer = torch.optim.Adam([*model.mix.parameters(), model.bias], lr=1e-2)

for epoch in range(6):
    for user, item, score in loader:
        loss = nn.functional.mse_loss(model(user, item), score)
        sparse_optimizer.zero_grad()
        dense_optimizer.zero_grad()
        loss.backward()
        sparse_optimizer.step()
        dense_optimizer.step()
    with torch.no_grad():
        error = nn.functional.mse_loss(model(users[1400:], items[1400:]), scores[1400:]).item()
    print(f"epoch {epoch}: test error {error:.4f}")

print("digest", json.dumps({"error": error, "bias": model.bias.item()}))
