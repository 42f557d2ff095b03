"""Sequence to sequence with attention: numbers are written in reverse. Encoder and decoder have an optimizer each."""

import json

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
LENGTH, SYMBOLS, START, HIDDEN = 5, 8, 8, 24


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, tokens):
        return self.gru(self.embedding(tokens))


class AttnDecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS + 1, HIDDEN)
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.gru = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, token, hidden, encoded):
        scores = torch.einsum("bh,bth->bt", self.query(hidden[0]), encoded) / HIDDEN**0.5
        context = torch.einsum("bt,bth->bh", scores.softmax(1), encoded)
        output, hidden = self.gru(torch.cat([self.embedding(token), context], 1)[:, None], hidden)
        return self.out(output[:, 0]), hidden


def decoded(encoder, decoder, source, target):
    """The mean loss of the decoder, which is given the right symbol before each one (teacher forcing)."""
    encoded, hidden = encoder(source)
    token, losses = torch.full((len(source),), START), []
    for t in range(LENGTH):
        logits, hidden = decoder(token, hidden, encoded)
        losses.append(F.cross_entropy(logits, target[:, t]))
        token = target[:, t]
    return torch.stack(losses).mean()


numbers = torch.randint(SYMBOLS, (700, LENGTH))
loader = DataLoader(TensorDataset(numbers[:600], numbers[:600].flip(1)), batch_size=30, shuffle=True)

encoder, decoder = EncoderRNN(), AttnDecoderRNN()
optimizer_e = torch.optim.Adam(encoder.parameters(), lr=5e-3)
optimizer_d = torch.optim.Adam(decoder.parameters(), lr=5e-3)

for epoch in range(4):
    for source, target in loader:
        optimizer_e.zero_grad()
        optimizer_d.zero_grad()
        loss = decoded(encoder, decoder, source, target)
        loss.backward()
        optimizer_e.step()
        optimizer_d.step()
    with torch.no_grad():
        test_loss = decoded(encoder, decoder, numbers[600:], numbers[600:].flip(1)).item()
    print(f"epoch {epoch}: test loss {test_loss:.4f}")

print("digest", json.dumps({"loss": test_loss}))
