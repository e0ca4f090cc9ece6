"""TRGP in full n x n matrices, as the published code has it: the yardstick of the engine's bench.

B Q B' and B B' are formed in every forward pass and differentiated through, Q is a full n x n
parameter of which a corner is used, and gradients are projected by the dense P = M M'.
"""

from dataclasses import dataclass

import torch

from trgp.core import native
from trgp.methods.base import Context, Grads
from trgp.methods.gpm import GPMMethod
from trgp.methods.layerwise import Along
from trgp.methods.protected import Directions
from trgp.tree import level, put, tensors
from trgp.types import Params, State, matches

OWN = "dense Q "


@dataclass(frozen=True)
class Dense(GPMMethod):
    """Trusts the first two old tasks in every layer; plain SGD on W, the heads and the Q."""

    no_scaling: tuple[str, ...] = ()

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        params, state = dict(ctx.params), ctx.state
        for name, each in self.layers.items():
            old = Directions.read(state, each.layer)
            held = {"P": old.M[0] @ old.M[0].mT}
            if not matches(name, self.no_scaling):
                for j in (0, 1):
                    held[f"B{j}"] = old.basis(j)[0]
                    params[f"{OWN}{name} {j}"] = torch.eye(old.M.shape[1], device=old.M.device)
            state = put(state, held, "dense", name)
        return params, state

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        weights = {n: p for n, p in params.items() if not n.startswith(OWN)}
        for name, each in self.layers.items():
            held = tensors(level(state, "dense", name))
            W = weights[each.names[0]].flatten(1)
            total = W
            for j in (0, 1):
                if f"B{j}" in held:
                    B, Q = held[f"B{j}"], params[f"{OWN}{name} {j}"]
                    r = B.shape[1]
                    total = total + W @ (B @ Q[:r, :r] @ B.mT) - W @ (B @ B.mT)
            weights[each.names[0]] = total.view_as(weights[each.names[0]])
        return weights

    def factored(self, state: State, batch_size: int) -> frozenset[str]:
        return frozenset()

    def along(self, name: str, grads: Grads, state: State) -> Along:
        G = self.layers[name].gradient(grads)
        P = tensors(level(state, "dense", name))["P"]
        return Along(True, native.Product(G.mT, P.unsqueeze(0)))
