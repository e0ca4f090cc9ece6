"""Parts that no projection can protect: still after the first task."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import nn


@dataclass
class Frozen:
    """Parameters that no longer train and norm layers that stay in eval mode, until `thaw`."""

    params: dict[str, nn.Parameter] = field(default_factory=dict)
    norms: list[nn.Module] = field(default_factory=list)

    def freeze(self, params: Mapping[str, nn.Parameter], norms: Iterable[nn.Module]) -> None:
        for param in params.values():
            param.requires_grad_(False)
            param.grad = None  # an optimizer kept from before must find nothing to do
        self.params |= params
        for norm in norms:
            # `model.train()` calls this on every module: no hook, so nothing is added to a forward.
            norm.train = partial(_stay_in_eval, norm)  # type: ignore[method-assign]
            norm.eval()
            self.norms.append(norm)

    def thaw(self) -> None:
        for param in self.params.values():
            param.requires_grad_(True)
        for norm in self.norms:
            vars(norm).pop("train", None)
        self.params, self.norms = {}, []


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return type(module).train(module, False)
