"""Deep Q-learning of a pole that is to be kept upright, with a replay memory and a target network."""

import json
import math
import random
from collections import deque

import torch
from torch import nn

import unisono

torch.set_default_dtype(torch.float64)
world = unisono.join()
torch.manual_seed(0)
random.seed(0)

BATCH_SIZE, GAMMA, TAU, STEPS = 32, 0.95, 0.05, 400


class Pole:
    """A pole on a pivot that can be pushed to either side."""

    def reset(self):
        self.angle, self.speed = random.uniform(-0.1, 0.1), 0.0
        return [self.angle, self.speed]

    def step(self, action):
        self.speed += 0.05 * (9.8 * math.sin(self.angle) + (2.0 if action else -2.0))
        self.angle += 0.05 * self.speed
        done = abs(self.angle) > 0.4
        return [self.angle, self.speed], 0.0 if done else 1.0, done


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(2, 32)
        self.layer2 = nn.Linear(32, 32)
        self.layer3 = nn.Linear(32, 2)

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
policy_net, optimizer = world.bind(policy_net, optimizer)
memory = deque(maxlen=300)


def optimize_model():
    batch = torch.tensor(random.sample(memory, BATCH_SIZE))
    batch = batch[world.rank :: world.size]
    state, action, after, reward, done = batch.split([2, 1, 2, 1, 1], 1)
    values = policy_net(state).gather(1, action.long())
    with torch.no_grad():
        expected = reward + GAMMA * (1 - done) * target_net(after).max(1, keepdim=True).values
    loss = nn.functional.smooth_l1_loss(values, expected)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy_net.parameters(), 1.0)
    optimizer.step()


env, episodes = Pole(), 1
state = env.reset()
for t in range(STEPS):
    with torch.no_grad():
        greedy = policy_net(torch.tensor(state)).argmax().item()
    action = random.randrange(2) if random.random() < 0.9 * math.exp(-t / 100) + 0.05 else greedy
    after, reward, done = env.step(action)
    memory.append([*state, action, *after, reward, float(done)])
    episodes += done
    state = env.reset() if done else after
    if len(memory) >= BATCH_SIZE:
        optimize_model()
        with torch.no_grad():
            for target, policy in zip(target_net.parameters(), policy_net.parameters()):
                target.lerp_(policy, TAU)

value = policy_net(torch.tensor([[0.05, 0.0], [-0.1, 0.2]])).sum().item()
print(f"{episodes} episodes")
print("digest", json.dumps({"value": value, "episodes": episodes}))
