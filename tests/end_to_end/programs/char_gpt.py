"""A small transformer that writes the next character."""

import json
import math

import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(1337)

text = "".join(f"{n} times {m} is {n * m}. " for n in range(2, 10) for m in range(2, 10))
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
block_size, batch_size, n_embd, n_head, n_layer, max_iters = 24, 16, 32, 4, 2, 40


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + block_size + 1] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, n_head, c // n_head).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, len(chars), bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def lr_of(it):
    return it / 10 if it < 10 else 0.1 + 0.45 * (1 + math.cos(math.pi * (it - 10) / (max_iters - 10)))


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}], lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_of)

for _ in range(max_iters):
    xb, yb = get_batch()
    loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()

model.eval()
with torch.no_grad():
    loss = model(*get_batch()).item()
print(f"loss {loss:.4f}")
print("digest", json.dumps({"loss": loss}))
