"""A graph convolutional network by hand, which finds the communities of a random graph."""

import json

import torch
from torch import nn
from torch.nn import functional as F

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()
torch.manual_seed(42)
NODES, CLASSES = 120, 3


def random_graph():
    """Features, a normalized adjacency matrix, and communities: edges are likelier inside of one."""
    labels = torch.arange(NODES) % CLASSES
    same = labels[:, None] == labels[None]
    edges = (torch.rand(NODES, NODES) < torch.where(same, 0.15, 0.02)).triu(1)
    adjacency = (edges | edges.t() | torch.eye(NODES, dtype=torch.bool)).to(torch.float64)
    scale = adjacency.sum(1).rsqrt()
    features = F.one_hot(labels, CLASSES) + 1.5 * torch.randn(NODES, CLASSES)
    return features, scale[:, None] * adjacency * scale, labels


class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adjacency):
        return adjacency @ (x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.gc1 = GraphConvolution(CLASSES, hidden)
        self.gc2 = GraphConvolution(hidden, CLASSES)

    def forward(self, x, adjacency):
        return F.log_softmax(self.gc2(F.relu(self.gc1(x, adjacency)), adjacency), dim=1)


features, adjacency, labels = random_graph()
order = torch.randperm(NODES)
idx_train, idx_test = order[:40], order[40:]
idx_train = idx_train[world.rank :: world.size]

model = GCN(16)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
model, optimizer = world.bind(model, optimizer)

for _ in range(100):
    model.train()
    optimizer.zero_grad()
    output = model(features, adjacency)
    loss = F.nll_loss(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad():
    output = model(features, adjacency)
test_loss = F.nll_loss(output[idx_test], labels[idx_test]).item()
accuracy = (output[idx_test].argmax(1) == labels[idx_test]).double().mean().item()
print(f"test loss {test_loss:.4f}, accuracy {accuracy:.3f}")
print("digest", json.dumps({"loss": test_loss, "accuracy": accuracy}))
