"""The controller of RCL: an LSTM that says how many units each layer gets, learnt by REINFORCE.

One step per layer: the first sees a fixed random vector, each later one the logits of the action
before. A linear function of that vector is the baseline that rewards are held against. It has
random numbers of its own and always computes on the CPU, so that a run's actions depend on its seed
and its rewards alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

HIDDEN, LAYERS = 100, 2
RATE, BASELINE_RATE = 1e-3, 5e-3  # Adam's, as published


class Controller:
    """For some layers and numbers of choices."""

    def __init__(self, layers: int, choices: int, seed: int) -> None:
        """`choices`: 0 units and up."""
        self._layers = layers
        self._draw = torch.Generator().manual_seed(seed)
        # Modules draw from torch's own generator, which is then as it was.
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
        """Some actions: a choice for every layer."""
        with torch.no_grad():
            chances = self._logits().softmax(1)
        drawn = [torch.multinomial(p, count, True, generator=self._draw) for p in chances]
        found: list[list[int]] = torch.stack(drawn, 1).tolist()
        return found

    def learn(self, actions: Sequence[Sequence[int]], rewards: Sequence[float]) -> None:
        """One step of the policy along its rewards, and one of the baseline towards them."""
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
        """Of every layer's choices (layers, choices)."""
        x, state, found = self._start, None, []
        for _ in range(self._layers):
            hidden, state = self._lstm(x, state)
            x = self._choose(hidden)
            found.append(x.flatten())
        return torch.stack(found)
