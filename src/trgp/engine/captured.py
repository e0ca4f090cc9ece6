"""Captured steps of one task: each step, from batch indices to update, is replayed as one graph.

The code of a step is the eager one. All that differs from step to step lies in tensors at fixed
addresses: the number of finished steps, the epoch's rows of indices, the learning rate, the
parameters and the moving state. Several runs can be vmapped: these tensors then have the runs as
their first axis, and `stacked` computes the step.
"""

from collections import Counter
from collections.abc import Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..benchmarks.data import Tensors
from ..methods.base import Batch, Method
from ..tree import from_leaves, leaves
from ..types import Params, State
from .batches import Cut
from .gradients import Gradients, loss_and_gradients
from .replay import Replay
from .stacked import stacked_step
from .train import Trained, Work, check_moving, progress_of, train_step

CHUNK = 64  # steps queued per turn; far more would fill the queue of the device
FLOATS = 1 << 31  # bytes; the samples of a task are normalised beforehand if they take no more


class CapturedTask:
    """Captured steps of one task, for one run or several vmapped runs of equal shapes."""

    def __init__(
        self,
        method: Method,
        works: Sequence[Work],
        stacked: bool = False,
        gradients: Gradients = loss_and_gradients,
    ) -> None:
        """Load the first epoch of every run into tensors at fixed addresses.

        Args:
            method: the first run's; the others have the same options wherever a step reads one.
            gradients: computes the gradients of a single run.
        """
        device = method.network.device
        first = works[0].epoch
        if len({tuple(len(part.samples) for part in work.epoch.parts) for work in works}) > 1:
            raise RuntimeError("the runs differ in their numbers of samples")
        self.task = first.task
        self._method = method
        self._stacked = stacked
        self._gradients = gradients
        params = [self._params_of(work) for work in works]
        states = [method.padded(work.state) if stacked else work.state for work in works]
        names = params[0]
        self._trained = [name for name in first.trained if name in names]
        self._factored = method.factored(states[0], first.batch_size)
        self._params = {name: self._joined([own[name] for own in params]) for name in names}
        each = [dict(leaves(state)) for state in states]
        joined = {path: self._joined([state[path] for state in each]) for path in each[0]}
        self._fixed = {p: t for p, t in joined.items() if not self._is_moving(p)}
        self._moving = {p: t for p, t in joined.items() if self._is_moving(p)}
        self._samples = [
            _together([work.epoch.parts[i].samples for work in works])
            for i in range(len(first.parts))
        ]
        self._numbers = self._joined([work.epoch.numbers(method) for work in works])
        self._progress = progress_of(self._numbers[0] if stacked else self._numbers)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._rows = self._joined_rows(works)
        # A float64 rate has all digits of Python's number; a step casts it to the weights' type.
        # Vmapped runs, whose bits differ from a single run's anyway, are spared the casts.
        wide = not stacked or any(t.dtype == torch.float64 for t in self._params.values())
        dtype = torch.float64 if wide else torch.float32
        self._lr = self._joined([torch.zeros((), dtype=dtype, device=device) for _ in works])
        lead = (len(works),) if stacked else ()
        self._total = torch.zeros(lead, dtype=torch.float64, device=device)
        self._replay = Replay(device)

    def train(self, works: Sequence[Work]) -> Generator[None, None, list[Trained]]:
        """Train every run for one eager epoch, with pauses in which other runs queue their work."""
        method = self._method
        first = works[0].epoch
        batches, _ = first.rows()
        begins = "first" in method.needs and first.number == 0
        method.train_mode(self.task)
        self._load(works)
        for cut, count in Counter(batches).items():
            if (cut, begins) not in self._replay:
                # Capture at a batch of this cut: indices of another may lie outside of this part.
                self._step.fill_(batches.index(cut))
                body = partial(self._body, works[0], cut, begins)
                self._replay.prepare((cut, begins), body, count)
                self._load(works)  # again: the capture has changed it
        first.settle(method)
        for k, cut in enumerate(batches):
            if k and k % CHUNK == 0:
                yield
            self._replay((cut, begins))
        loss = self._total / sum(cut.length for cut in batches)
        return [self._result(k, work, loss) for k, work in enumerate(works)]

    def forget(self) -> None:
        """Release the captured graphs, which may refer back to this task."""
        self._replay = Replay(self._step.device)

    def _load(self, works: Sequence[Work]) -> None:
        """Copy the start of an epoch into the tensors that the graphs use."""
        params = [self._params_of(work) for work in works]
        for name, tensor in self._params.items():
            self._put(tensor, [own[name] for own in params])
        states = [dict(leaves(work.state)) for work in works] if self._moving else []
        for path, tensor in self._moving.items():
            self._put(tensor, [state[path] for state in states])
        self._put(self._numbers, [work.epoch.numbers(self._method) for work in works])
        self._rows.copy_(self._joined_rows(works))
        self._put(self._lr, [torch.tensor(work.epoch.lr, dtype=torch.float64) for work in works])
        self._step.zero_()
        self._total.zero_()

    def _body(self, work: Work, cut: Cut, first: bool) -> None:
        part, samples = work.epoch.parts[cut.part], self._samples[cut.part]
        index = self._rows.index_select(-2, self._step).squeeze(-2)[..., : cut.length]
        x, y = samples.batch(index.flatten())
        u = progress = None
        if self._numbers.shape[-1]:
            u = self._numbers.index_select(-2, self._step).squeeze(-2)
        if "progress" in self._method.needs:
            progress = self._progress.index_select(0, self._step).squeeze(0)
        batch = Batch(
            x.view(*index.shape, *x.shape[1:]),
            y.view(index.shape),
            part.task,
            part.head,
            u,
            first,
            0.0 if progress is None else progress,
        )
        state = from_leaves({**self._fixed, **self._moving})
        params, changes, loss = self._stepped(state, batch)
        with torch.no_grad():
            changed = [n for n, tensor in params.items() if tensor is not self._params[n]]
            if new := [path for path, _ in leaves(changes) if path not in self._moving]:
                raise ValueError(
                    f"A step added {', '.join(new)} to the state; create it in begin_task."
                )
            moved = [(p, t) for p, t in leaves(changes) if t is not self._moving[p]]
            if changed or moved:
                torch._foreach_copy_(
                    [self._params[n] for n in changed] + [self._moving[p] for p, _ in moved],
                    [params[n] for n in changed] + [t for _, t in moved],
                )
            self._total.add_(loss, alpha=cut.length)
            self._step += 1

    def _stepped(self, state: State, batch: Batch) -> tuple[Params, State, Tensor]:
        method = self._method
        if not self._stacked:
            params, after, loss = train_step(
                method,
                self._params,
                state,
                batch,
                self._lr,
                self._trained,
                self._factored,
                self._gradients,
                give=True,
            )
            return params, {k: after[k] for k in method.moving if k in after}, loss
        params, changes, loss = stacked_step(
            method, self._params, state, batch, self._lr, self._trained, self._factored
        )
        check_moving(method, changes)
        return params, changes, loss

    def _result(self, k: int, work: Work, loss: Tensor) -> Trained:
        """Return the result of run k, with the names and shapes that it has alone."""
        params: Params = {n: self._own(t, k).clone() for n, t in self._params.items()}
        if self._stacked:
            params = self._method.from_stack(params, work.params, work.state)
        moved = {path: self._own(tensor, k).clone() for path, tensor in self._moving.items()}
        state = {**work.state, **from_leaves(moved)}
        return Trained({n: params[n] for n in work.params}, state, self._own(loss, k).clone())

    def _is_moving(self, path: str) -> bool:
        return path.partition("/")[0] in self._method.moving

    def _params_of(self, work: Work) -> Params:
        """Parameters at the start of an epoch; vmapped runs share their names and shapes."""
        if self._stacked:
            return self._method.to_stack(work.params, work.state)
        return work.params

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(tensors)) if self._stacked else tensors[0].clone()

    def _joined_rows(self, works: Sequence[Work]) -> Tensor:
        """Index rows on the device, offset per vmapped run, whose samples follow the others'."""
        rows = []
        for k, work in enumerate(works):
            cuts, own = work.epoch.rows()
            if k:
                counts = torch.tensor([len(part.samples) for part in work.epoch.parts])
                own = own + k * counts[[cut.part for cut in cuts]][:, None]
            rows.append(own)
        return self._joined(rows).to(self._step.device)

    def _put(self, target: Tensor, values: Sequence[Tensor]) -> None:
        for k, value in enumerate(values):
            self._own(target, k).copy_(value)

    def _own(self, tensor: Tensor, k: int) -> Tensor:
        return tensor[k] if self._stacked else tensor


def _together(sets: Sequence[Tensors]) -> Tensors:
    """Concatenate the samples of all runs, normalised beforehand if there is room."""
    first = sets[0]
    if sum(samples.x.numel() for samples in sets) * 4 <= FLOATS:
        sets = [Tensors(*samples.batch(slice(None))) for samples in sets]
        first = sets[0]
    if len(sets) == 1:
        return first
    x, y = torch.cat([s.x for s in sets]), torch.cat([s.y for s in sets])
    return Tensors(x, y, first.normalisation)
