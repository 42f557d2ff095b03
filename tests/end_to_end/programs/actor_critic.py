"""Advantage actor-critic with two networks, on several copies of a corridor."""

import json

import torch
from torch import nn
from torch.distributions import Categorical

torch.set_default_dtype(torch.float64)
torch.manual_seed(543)

COPIES, LENGTH, ROLLOUT, UPDATES, GAMMA = 16, 6, 8, 30, 0.9


class Corridors:
    """In each copy, the goal lies at one end of a corridor; the position is seen as a one-hot vector."""

    def __init__(self):
        self.position = torch.full((COPIES,), LENGTH // 2)

    def observe(self):
        return nn.functional.one_hot(self.position, LENGTH).to(torch.float64)

    def step(self, action):
        self.position = (self.position + 2 * action - 1).clamp(0, LENGTH - 1)
        reached = self.position == LENGTH - 1
        self.position = torch.where(reached, torch.randint(LENGTH - 1, (COPIES,)), self.position)
        return reached.to(torch.float64) - 0.05


def net(outputs):
    return nn.Sequential(nn.Linear(LENGTH, 16), nn.Tanh(), nn.Linear(16, outputs))


def returns_of(rewards, last):
    found = []
    for reward in reversed(rewards):
        last = reward + GAMMA * last
        found.insert(0, last)
    return torch.stack(found)


actor, critic = net(2), net(1)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=0.01)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.02)

env, running = Corridors(), 0.0
for _ in range(UPDATES):
    states, actions, rewards = [], [], []
    for _ in range(ROLLOUT):
        states.append(env.observe())
        with torch.no_grad():
            actions.append(Categorical(logits=actor(states[-1])).sample())
        rewards.append(env.step(actions[-1]))
    with torch.no_grad():
        returns = returns_of(rewards, critic(env.observe()).squeeze(1))
    states, actions = torch.stack(states), torch.stack(actions)
    running = 0.9 * running + 0.1 * torch.stack(rewards).mean().item()

    values = critic(states).squeeze(-1)
    policy = Categorical(logits=actor(states))
    advantage = returns - values.detach()
    actor_loss = -(policy.log_prob(actions) * advantage).mean() - 0.01 * policy.entropy().mean()
    critic_loss = nn.functional.mse_loss(values, returns)

    actor_optimizer.zero_grad()
    actor_loss.backward()
    nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
    actor_optimizer.step()
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()

print(f"running reward {running:.4f}")
print("digest", json.dumps({"reward": running, "value": critic(torch.eye(LENGTH)).sum().item()}))
