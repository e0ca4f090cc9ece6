"""One protected layer while a task is open: core/keep in place, on a weight and its biases apart.

`keep` writes [weight | biases] as one matrix W (g, o, n). Here its columns stay where they are: a
product with M is the weight's product with M's first rows plus each bias times a row of its own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ..core.keep import Form, Region, reached, shown
from ..core.layers import Layer, local
from ..core.memory import Memory
from ..core.precision import doubled
from ..core.subspace import complement

REFRESH = 10  # of so many steps on the complement, one measures the coordinates anew


class Decay(NamedTuple):
    """An optimizer's weight decay of a layer: added to gradients, or decoupled from them."""

    decoupled: bool
    rate: float | Tensor  # of the weight
    biases: tuple[float, ...]  # each bias's own, in proportion to the weight's


class LayerGuard:
    """The region of a layer, its coordinates K now, and how updates are kept within the reach."""

    def __init__(self, layer: Layer, memory: Memory, region: Region) -> None:
        """Start at K = C: the model holds the shared weight."""
        self.layer = layer
        self.region = region
        self.K = region.C.clone() if region.blocks else region.C
        self.N: Tensor | None = None
        narrow = memory.M.shape[1] - int(memory.ranks.min()) < memory.M.shape[2]
        if not region.blocks and narrow:
            # M fills more than half of the space: what is orthogonal to it has fewer columns.
            self.N = complement(memory.M, memory.ranks)
        self.steps = 0
        self._before: list[Tensor] | None = None
        self._decayed: Tensor | None = None  # in a step whose optimizer decays apart from gradients
        self._shown: list[tuple[ReferenceType[Tensor], int, int]] = []
        self._written: list[tuple[int, int]] = []
        self.remember_writes()

    def resume(self, steps: int, K: Tensor) -> None:
        """Go on where a saved task was; the model's weights are looked at before the next step."""
        self.steps, self.K = steps, K
        self._written = []

    def __getstate__(self) -> dict[str, Any]:
        """Copy without what belongs to a step."""
        return vars(self) | {"_before": None, "_decayed": None, "_shown": []}

    @property
    def params(self) -> list[nn.Parameter]:
        """The layer's weight and biases, wherever they are now."""
        return self.layer.params

    # ---- before a step ----------------------------------------------------------------------

    def filter_gradients(self, form: Form, scale_rate: float, decay: Decay | None) -> None:
        """Replace the gradients' part inside span(M) by P's, once for every gradient.

        A decay that the optimizer will add to the gradient is corrected here: the shared weight
        decays outside span(M), and K - C inside.
        """
        given = [p.grad for p in self.params if p.grad is not None]
        if len(given) < len(self.params) or self._was_shown(given):
            return
        grads = [local(g) for g in given]
        if self.N is not None:
            free = self._inner(grads, self.N)
            for g in grads:
                g.zero_()
            self._add(grads, free, self.N, 1)
        else:
            T = self._inner(grads, self.region.M)
            X = shown(T, self.region, form, scale_rate).sub_(T)
            if decay is not None and not decay.decoupled:
                factor = scale_rate - 1 if form == "paper" else 0.0
                X += decay.rate * ((self.K - self.region.C) * factor - self._decaying(decay))
                self._add_to_biases(grads[1:], decay, -decay.rate)
            self._add(grads, X, self.region.M, 1)
        # A gradient in rows counts writes to the whole apart from writes to its rows.
        self._shown = [(ref(g), g._version, local(g)._version) for g in given]

    def _was_shown(self, grads: Sequence[Tensor]) -> bool:
        return len(self._shown) == len(grads) and all(
            seen() is g and whole == g._version and rows == local(g)._version
            for g, (seen, whole, rows) in zip(grads, self._shown, strict=True)
        )

    def remember_decay(self, decay: Decay | None) -> None:
        """Take the coordinates that a decoupled decay will shrink, before it does."""
        self._decayed = self._decaying(decay) if decay is not None and decay.decoupled else None

    def remember(self) -> None:
        """Copy the weights before a step, where the update is measured from them."""
        self.steps += 1
        on_complement = self.N is not None and self.steps % REFRESH > 0
        # Half precision rounds what it stores: K would follow the rounding of whole weights.
        half = self.region.blocks and self.layer.weight.param.dtype != self.layer.dtype
        wanted = on_complement or half
        self._before = [w.detach().clone() for w in self.layer.weights] if wanted else None

    def forget_momentum(self, buffers: Sequence[Tensor]) -> None:
        """Take an earlier task's momentum out of span(M), which it would leave at once."""
        rows = [local(buffer) for buffer in buffers]
        self._add(rows, self._inner(rows, self.region.M), self.region.M, -1)

    # ---- after a step -----------------------------------------------------------------------

    def keep_update(self, decay: Decay | None = None, lr: float | Tensor = 0.0) -> None:
        """Keep what the step did inside span(M) within the reach."""
        M, K, weights = self.region.M, self.K, self.layer.weights
        if self._before is not None and self.N is not None:
            moved = [w - q for w, q in zip(weights, self._before, strict=True)]
            free = self._inner(moved, self.N)
            for w, q in zip(weights, self._before, strict=True):
                w.copy_(q)
            self._add(weights, free, self.N, 1)
        else:
            if decay is not None and self._decayed is not None:
                self._add_to_biases(weights[1:], decay, lr * decay.rate)
            D = self._inner(weights, M).sub_(K)
            if self.region.blocks:  # else K = C, and nothing may move
                measured = D
                if self._before is not None:
                    moved = [w - q for w, q in zip(weights, self._before, strict=True)]
                    measured = self._inner(moved, M)
                if decay is not None and self._decayed is not None:
                    measured = measured + lr * decay.rate * self._decayed
                E = reached(measured, self.region)
                D -= E
                K += E
            self._add(weights, D, M, -1)
        self._before = self._decayed = None
        self.remember_writes()

    def remember_writes(self) -> None:
        """Remember the weights as our own: any other change of them is told."""
        self._written = self._writes()

    @property
    def written_elsewhere(self) -> bool:
        """Whether anything but this guard has written the weights since."""
        return self._written != self._writes()

    def _writes(self) -> list[tuple[int, int]]:
        """Where the weights lie and how often they were written, alike on ranks that share them.

        Rows may lie elsewhere on one rank alone, which would then wait for the others in `adopt`:
        a weight in rows has no address, and goes by its identity.
        """
        return [(p.data_ptr() or id(p), p._version) for p in self.params]

    def adopt(self) -> float:
        """Adopt weights that were loaded: K follows within the reach, the rest is taken out.

        Returns the share of the weight's norm that was taken out; below rounding nothing is done.
        """
        weights = self.layer.weights
        inner = self._inner(weights, self.region.M)
        D = inner - self.region.C  # not K, which steps that diverged may have left as NaN
        E = reached(D, self.region)
        size = torch.stack([doubled(w.detach().norm()) for w in weights]).norm()
        parts = (D - E, inner - self.K)
        refused, whole = (float(doubled(x).norm() / size.clamp_min(1e-300)) for x in parts)
        rounding = max(1e-6, torch.finfo(self.layer.weight.param.dtype).eps)
        if not whole <= rounding:
            if self.region.blocks:
                torch.add(self.region.C, E, out=self.K)
            self._add(weights, D - E, self.region.M, -1)
        self.remember_writes()
        return refused if not refused <= rounding else 0.0

    def follow(self) -> None:
        """Follow the model to another device or precision."""
        device, dtype = self.layer.weight.param.device, self.layer.dtype
        if self.K.device != device or self.K.dtype != dtype:
            parts = self.region.M, self.region.C
            M, C = (t.to(device, dtype) for t in parts)
            blocks = tuple(
                b._replace(gain=b.gain.to(device, dtype), reach=b.reach.to(device, dtype))
                for b in self.region.blocks
            )
            places = None if self.region.places is None else self.region.places.to(device)
            self.region = Region(M, C, blocks, places, self.region.sum_rows)
            self.K = self.K.to(device, dtype)
            self.N = self.N.to(device, dtype) if self.N is not None else None

    # ---- products ---------------------------------------------------------------------------

    def _decaying(self, decay: Decay) -> Tensor:
        """The coordinates of what decays of the shared weight, biases at rates of their own."""
        total = self.region.C
        for i, (bias, own) in enumerate(zip(self.layer.weights[1:], decay.biases, strict=True)):
            if own != 1:
                shared = self.layer.by_group(bias).to(total) - self._shift(i)
                total = total + (own - 1) * shared * self._bias_row(i)
        return total

    def _add_to_biases(self, tensors: Sequence[Tensor], decay: Decay, rate: float | Tensor) -> None:
        """Let K - C decay in the biases as it does in the weight, not at their own rates."""
        for i, (tensor, own) in enumerate(zip(tensors, decay.biases, strict=True)):
            if own != 1:
                tensor.add_(rate * (own - 1) * self._shift(i).reshape(tensor.shape))

    def _shift(self, i: int) -> Tensor:
        """(g, o, 1): how the task's bias differs from the shared one inside span(M)."""
        return (self.K - self.region.C) @ self._bias_row(i).mT

    def _bias_row(self, i: int) -> Tensor:
        """(g, 1, m): the row of M that belongs to a bias."""
        row = self.region.M.shape[1] - len(self.params) + 1 + i
        return self.region.M[:, row : row + 1]

    def _inner(self, tensors: Sequence[Tensor], basis: Tensor) -> Tensor:
        """[weight | biases] times the basis (g, n, k), without joining them: (g, o, k)."""
        weight, *biases = tensors
        kernel = basis.shape[1] - len(biases)
        W = self.layer.layout.matrices(weight).to(basis.dtype)
        inner = W @ basis[:, :kernel]
        for i, bias in enumerate(biases):
            b = self.layer.by_group(bias).to(basis.dtype)
            inner.addcmul_(b, basis[:, kernel + i : kernel + i + 1])
        return inner

    def _add(self, tensors: Sequence[Tensor], inner: Tensor, basis: Tensor, sign: int) -> None:
        """[weight | biases] += sign * inner basis', in place."""
        weight, *biases = tensors
        kernel = basis.shape[1] - len(biases)
        if weight.dtype == basis.dtype and weight.is_contiguous():
            W = self.layer.layout.matrices(weight)
            W.baddbmm_(inner, basis[:, :kernel].mT, alpha=sign)
        else:
            change = self.layer.layout.tensor(inner @ basis[:, :kernel].mT, weight)
            weight.add_(change, alpha=sign)
        for i, bias in enumerate(biases):
            change = inner @ basis[:, kernel + i].unsqueeze(2)
            bias.add_(change.reshape(bias.shape), alpha=sign)
