"""A language model of words: an LSTM trained by truncated backpropagation through time."""

import json

import torch
from torch import nn

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()
torch.manual_seed(1111)

bptt, batch_size, epochs, clip = 8, 8, 6, 0.5
subjects, verbs, objects = (
    ["the cat", "a dog", "my friend", "the old man"],
    ["sees", "likes", "finds"],
    ["it", "a bird"],
)
words = [word for n in range(260) for word in f"{subjects[n % 4]} {verbs[n * n % 3]} {objects[n // 3 % 2]} .".split()]
vocabulary = sorted(set(words))
ids = torch.tensor([vocabulary.index(word) for word in words])


def batchify(data, bsz):
    """Cut `data` into `bsz` streams, which are the columns of the result."""
    length = len(data) // bsz
    return data[: length * bsz].view(bsz, length).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, num_layers=2)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.5, 0.5)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def repackage_hidden(hidden):
    return None if hidden is None else tuple(each.detach() for each in hidden)


def get_batch(source, i):
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].flatten()


train_data, val_data = batchify(ids[:1000], batch_size), batchify(ids[1000:], 4)
train_data = train_data[:, world.rank :: world.size]
model = RNNModel(len(vocabulary), 16, 24)
optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
model, optimizer = world.bind(model, optimizer)
criterion = nn.CrossEntropyLoss()
best = None

for epoch in range(epochs):
    model.train()
    hidden = None
    for i in range(0, len(train_data) - 1, bptt):
        data, targets = get_batch(train_data, i)
        hidden = repackage_hidden(hidden)
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = criterion(model(val_data[:-1], None)[0], val_data[1:].flatten()).item()
    print(f"epoch {epoch}: validation loss {val_loss:.4f}")
    if best is None or val_loss < best:
        best = val_loss
    else:
        optimizer.param_groups[0]["lr"] /= 4.0

print("digest", json.dumps({"loss": val_loss, "best": best}))
