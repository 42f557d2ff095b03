"""Two averages of weights, an exponential one and a stochastic one, against the weights themselves."""

import copy
import json

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()
torch.manual_seed(7)


class EMA:
    """Keeps a slowly moving copy of a model."""

    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    def update(self, model):
        with torch.no_grad():
            for slow, fast in zip(self.module.state_dict().values(), model.state_dict().values()):
                slow.mul_(self.decay).add_(fast, alpha=1 - self.decay)


patients = load_diabetes()
x = torch.tensor(patients.data) * 20
y = torch.tensor(patients.target)[:, None] / 100 - 1.5
loader = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
model, optimizer = world.bind(model, optimizer)
ema, swa_model = EMA(model, decay=0.9), AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
swa_start = 5

for epoch in range(10):
    model.train()
    for inputs, targets in loader:
        inputs, targets = inputs[world.rank :: world.size], targets[world.rank :: world.size]
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
    if epoch >= swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()


def test(net):
    net.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(net(x[320:]), y[320:]).item()


results = {"weights": test(model), "ema": test(ema.module), "swa": test(swa_model)}
print(", ".join(f"{name} {loss:.4f}" for name, loss in results.items()))
print("digest", json.dumps(results))
