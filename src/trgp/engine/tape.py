"""A body of work on the CPU as the row of tensor operations that it comes to.

A small step on a CPU is mostly Python, modules, hooks and autograd on the way to a hundred short
operations. They are recorded while the body is done once, and from then on only they are repeated,
on the same tensors: views of tensors that stay where they are need not be taken again, and what
nobody reads is left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Body = Callable[[], None]
Place = tuple[Any, ...]
UNFIT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
UNUSED = "_"  # in the place of a result that is none
PLAIN = (int, bool, str, type(None))  # what Python can be given as text


def taped(body: Body) -> Body:
    """What repeats a body's operations, or the body where that would not be the same.

    It is done three times here; what that does to its tensors is of no use.
    """
    tape = _Tape()
    try:
        with tape:
            body()
    except _UnfitError:
        return body
    replay = tape.function()
    return replay if _same(body, replay, tape.begun_with) else body


class _UnfitError(Exception):
    """What a body does depends on more than shapes."""


@dataclass
class _Line:
    op: str
    text: str  # of its arguments
    reads: set[str]
    gives: list[str]
    kept: bool  # whether it does more than give its results
    many: bool  # whether these come as a list


class _Tape(TorchDispatchMode):
    """Records what is done while it is open."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begun_with: list[tuple[Tensor, Tensor]] = []
        """Each tensor that is written and was there before, and what it was then."""
        self._lines: list[_Line] = []
        self._fixed: dict[str, Any] = {}  # by name: operations, and what was there before
        self._names: dict[Place, str] = {}
        self._alive: list[Tensor] = []  # or another tensor might come to lie in the same place

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import torch's compiler: a second, for nothing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in UNFIT) and not _picks_by_number(func, args):
            raise _UnfitError
        reads: set[str] = set()
        text = ", ".join(
            [self._said(a, reads) for a in args]
            + [f"{key}={self._said(a, reads)}" for key, a in kwargs.items()]
        )
        writes = func._schema.is_mutable
        if writes:
            self._keep(_written(func, args, kwargs))
        result = func(*args, **kwargs)
        given = list(result) if isinstance(result, (list, tuple)) else [result]
        found = [each for each in given if each is not None]
        if not all(isinstance(each, Tensor) for each in found):
            if reads:
                raise _UnfitError
            return result  # such as a type, which no tensor had a say in
        if not writes and _is_view(found, args):
            if all(name in self._fixed for name in reads):
                for each in found:  # it lies where it will always lie
                    self._constant(each)
                return result
            if all(_place(each) in self._names for each in found):
                return result
        names = [UNUSED if each is None else self._result(each) for each in given]
        kept = writes or torch.Tag.nondeterministic_seeded in func.tags
        name = self._named("op", func._op)
        several = isinstance(result, (list, tuple))
        self._lines.append(_Line(name, text, reads, names if found else [], kept, several))
        return result

    def function(self) -> Body:
        """The recorded operations as one function."""
        lines = ["def replay():", *(f"    {line}" for line in self._source()), "    return None"]
        # As arguments with defaults they are local, which is the fastest place to find them.
        lines[0] = f"def replay({', '.join(f'{name}={name}' for name in self._fixed)}):"
        space = dict(self._fixed)
        exec("\n".join(lines), space)
        replay: Body = space["replay"]

        def once() -> None:
            with torch.inference_mode():
                replay()

        return once

    def _source(self) -> Iterator[str]:
        used: set[str] = set()
        wanted: list[tuple[_Line, list[str]]] = []
        for line in reversed(self._lines):
            if line.kept or used & set(line.gives):
                variables = {name for name in line.reads if name not in self._fixed}
                over = sorted(variables - used)
                used |= variables
                wanted.append((line, [n for n in over if n not in line.gives]))
        for line, over in reversed(wanted):
            call = f"{line.op}({line.text})"
            if line.many and line.gives:
                call = f"({', '.join(line.gives)},) = {call}"
            elif line.gives:
                call = f"{line.gives[0]} = {call}"
            yield call
            if over:
                yield f"del {', '.join(over)}"

    def _said(self, value: Any, reads: set[str]) -> str:
        """An argument as text."""
        if isinstance(value, Tensor):
            name = self._names.get(_place(value)) or self._constant(value)
            reads.add(name)
            return name
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return f"[{', '.join(self._said(each, reads) for each in value)}]"
        return repr(value) if isinstance(value, PLAIN) else self._named("x", value)

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        known = {_place(tensor) for tensor, _ in self.begun_with}
        for tensor in tensors:
            place = _place(tensor)
            if self._names.get(place) in self._fixed and place not in known:
                with torch._C._DisableTorchDispatch():
                    self.begun_with.append((tensor.detach(), tensor.detach().clone()))

    def _result(self, tensor: Tensor) -> str:
        place = _place(tensor)
        if place not in self._names:
            self._names[place] = f"t{len(self._names)}"
            self._alive.append(tensor)
        return self._names[place]

    def _constant(self, tensor: Tensor) -> str:
        place = _place(tensor)
        if place not in self._names:
            self._names[place] = self._named("c", tensor.detach())
        return self._names[place]

    def _named(self, kind: str, value: Any) -> str:
        name = f"{kind}{len(self._fixed)}"
        self._fixed[name] = value
        return name


def _picks_by_number(func: Any, args: Sequence[Any]) -> bool:
    """x[i], which only a mask in the place of i makes depend on more than shapes."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in masks for index in args[1]
    )


def _place(tensor: Tensor) -> Place:
    """Where a tensor lies, and how: two of the same place are always equal."""
    with torch._C._DisableTorchDispatch():
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_view(found: Sequence[Tensor], args: Sequence[Any]) -> bool:
    storages = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
    return bool(found) and all(each.untyped_storage()._cdata in storages for each in found)


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> Iterator[Tensor]:
    """The arguments that an operation changes."""
    for k, given in enumerate(func._schema.arguments):
        if given.alias_info is not None and given.alias_info.is_write:
            value = kwargs.get(given.name) if given.name in kwargs else args[k]
            yield from value if isinstance(value, (list, tuple)) else [value]


def _same(body: Body, replay: Body, begun_with: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether both do the same, from what the body left behind or, if it cannot be done again from
    there, from what it began with."""
    written = [tensor for tensor, _ in begun_with]
    left = [tensor.clone() for tensor in written]
    try:
        ends = [_after(work, written, left) for work in (body, replay)]
    except (RuntimeError, IndexError):  # there may be no other batch
        ends = [_after(work, written, [old for _, old in begun_with]) for work in (body, replay)]
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def _after(work: Body, written: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
    state = torch.get_rng_state()
    for tensor, old in zip(written, before, strict=True):
        tensor.copy_(old)
    try:
        work()
    finally:
        torch.set_rng_state(state)
    return [tensor.clone() for tensor in written]
