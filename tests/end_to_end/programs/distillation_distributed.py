"""Knowledge distillation: a small network learns from a larger one."""

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

T, soft_weight, hard_weight = 2.0, 0.5, 0.5


def network(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def train_teacher(model, loader, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def train_student(teacher, student, optimizer, loader, epochs):
    teacher.eval()
    student.train()
    for _ in range(epochs):
        for inputs, labels in loader:
            inputs, labels = inputs[world.rank :: world.size], labels[world.rank :: world.size]
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * T**2
            loss = soft_weight * soft_loss + hard_weight * F.cross_entropy(student_logits, labels)
            loss.backward()
            optimizer.step()


def test(model, x, y):
    model.eval()
    with torch.no_grad():
        logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double().mean().item()


digits = load_digits()
x, y = torch.tensor(digits.data / 16.0), torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=50, shuffle=True)

teacher, student = network(64), network(8)
train_teacher(teacher, train_loader, epochs=4)
optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
student, optimizer = world.bind(student, optimizer)
train_student(teacher, student, optimizer, train_loader, epochs=4)
of_teacher, _ = test(teacher, x[1000:], y[1000:])
loss, accuracy = test(student, x[1000:], y[1000:])
print(f"teacher {of_teacher:.4f}, student {loss:.4f}, accuracy {accuracy:.3f}")
print("digest", json.dumps({"teacher": of_teacher, "student": loss, "accuracy": accuracy}))
