"""Cross-validation: five models, each tested on the fifth of the data that it has not seen."""

import json

import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()

wine = load_wine()
x = torch.tensor(wine.data)[:176]
x, y = (x - x.mean(0)) / x.std(0), torch.tensor(wine.target)[:176]


def make_model():
    return nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))


def evaluate(model, chosen):
    model.eval()
    with torch.no_grad():
        output = model(x[chosen])
    accuracy = (output.argmax(1) == y[chosen]).double().mean().item()
    return nn.functional.cross_entropy(output, y[chosen]).item(), accuracy


def main():
    results = []
    for fold, (train_ids, test_ids) in enumerate(KFold(n_splits=4, shuffle=True, random_state=42).split(x)):
        torch.manual_seed(fold)
        train = TensorDataset(x[train_ids], y[train_ids])
        loader = DataLoader(train, batch_size=44, shuffle=True)
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model, optimizer = world.bind(model, optimizer)
        for _ in range(5):
            model.train()
            for inputs, targets in loader:
                inputs, targets = inputs[world.rank :: world.size], targets[world.rank :: world.size]
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
        results.append(evaluate(model, test_ids))
        print(f"fold {fold}: loss {results[-1][0]:.4f}, accuracy {results[-1][1]:.3f}")
    losses, accuracies = zip(*results)
    digest = {"losses": losses, "mean": sum(losses) / len(losses), "accuracy": sum(accuracies) / len(accuracies)}
    print("digest", json.dumps(digest))


if __name__ == "__main__":
    main()
