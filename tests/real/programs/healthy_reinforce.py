"""PyTorch's official example reinforce: a policy balances a pole and learns from the returns of whole episodes.

Healthy: episodes last 130 to 170 steps instead of 20; the loss need not fall. Source: TC fp_rate/workloads/reinforce.
"""

from __future__ import annotations

import math
import random

import torch
from torch import nn
from torch.nn import functional as F

from real.program import script

CAUSES = ()
SITES = ()
LOOP = True  # the data come from the policy itself


class Policy(nn.Module):
    """Probabilities of pushing left and right."""

    def __init__(self):
        super().__init__()
        self.affine1, self.dropout, self.affine2 = nn.Linear(4, 128), nn.Dropout(0.6), nn.Linear(128, 2)

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)


class Pole:
    """A pole of 1 m on a cart of 1 kg, pushed by 10 N every 20 ms (Barto, Sutton and Anderson, 1983)."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def reset(self) -> list[float]:
        self.state = [self.random.uniform(-0.05, 0.05) for _ in range(4)]
        return self.state

    def step(self, right: int) -> tuple[list[float], bool]:
        x, speed, angle, turn = self.state
        sin, cos = math.sin(angle), math.cos(angle)
        pushed = ((10 if right else -10) + 0.05 * turn**2 * sin) / 1.1
        turning = (9.8 * sin - cos * pushed) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        moving = pushed - 0.05 * turning * cos / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning]
        return self.state, abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)


def train(repaired: bool = False, seed: int = 0) -> float:
    torch.manual_seed(seed)
    pole, policy = Pole(seed), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    running = 10.0
    for _ in range(300):
        state, over, log_probs = pole.reset(), False, []
        while not over and len(log_probs) < 200:
            chosen = torch.distributions.Categorical(policy(torch.tensor([state])))
            action = chosen.sample()
            log_probs.append(chosen.log_prob(action))
            state, over = pole.step(int(action))
        running = 0.95 * running + 0.05 * len(log_probs)
        returns = torch.tensor([(1 - 0.99**left) / 0.01 for left in range(len(log_probs), 0, -1)])
        returns = (returns - returns.mean()) / (returns.std() + 1e-7)
        optimizer.zero_grad()
        loss = -(torch.cat(log_probs) * returns).sum()
        loss.backward()
        optimizer.step()
    return running


if __name__ == "__main__":
    script(train)
