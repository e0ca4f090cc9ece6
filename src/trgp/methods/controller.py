"""The controller of RCL: an LSTM that chooses the new units per layer, learnt by REINFORCE.

One step per layer: the first reads a fixed random vector, each later one the logits of the previous
action. A linear function of that vector is the baseline of the rewards. The controller has its own
random numbers and always computes on the CPU, so that a run's actions depend only on its seed and
its rewards.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

HIDDEN, LAYERS = 100, 2
RATE, BASELINE_RATE = 1e-3, 5e-3  # Adam's, as published


class Controller:
    """Policy over the number of new units per layer."""

    def __init__(self, layers: int, choices: int, seed: int) -> None:
        """Create a policy with `choices` options per layer, option 0 adding no unit."""
        self._layers = layers
        self._draw = torch.Generator().manual_seed(seed)
        # Modules draw from torch's global generator, whose state is restored.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._lstm = nn.LSTM(choices, HIDDEN, LAYERS)
            self._choose = nn.Linear(HIDDEN, choices)
            self._value = nn.Linear(choices, 1)
        self._start = torch.randn(1, 1, choices, generator=self._draw)
        policy = [*self._lstm.parameters(), *self._choose.parameters()]
        self._policy_optimizer = torch.optim.Adam(policy, lr=RATE)
        self._value_optimizer = torch.optim.Adam(self._value.parameters(), lr=BASELINE_RATE)

    def sample(self, count: int) -> list[list[int]]:
        """Sample actions, each with one choice per layer."""
        with torch.no_grad():
            chances = self._logits().softmax(1)
        drawn = [torch.multinomial(p, count, True, generator=self._draw) for p in chances]
        found: list[list[int]] = torch.stack(drawn, 1).tolist()
        return found

    def learn(self, actions: Sequence[Sequence[int]], rewards: Sequence[float]) -> None:
        """Take a REINFORCE step of the policy and a regression step of the baseline."""
        reward = torch.tensor(rewards)
        value = self._value(self._start.flatten())
        advantage = reward - value.detach()
        logs = self._logits().log_softmax(1)
        index = torch.tensor(actions)
        chosen = torch.stack([logs[k, index[:, k]] for k in range(self._layers)]).sum(0)
        for optimizer, loss in (
            (self._policy_optimizer, -(chosen * advantage).mean()),
            (self._value_optimizer, (reward - value).square().mean()),
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def _logits(self) -> Tensor:
        """Logits (layers, choices) of every layer's choices."""
        x, state, found = self._start, None, []
        for _ in range(self._layers):
            hidden, state = self._lstm(x, state)
            x = self._choose(hidden)
            found.append(x.flatten())
        return torch.stack(found)
