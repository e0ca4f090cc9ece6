"""Operation recorder: a body of work on the CPU as a list of tensor operations.

A small step on a CPU is mostly overhead: Python, modules, hooks and autograd around a hundred short
operations. These are recorded while the body runs once, and from then on only they are repeated, on
the same tensors. Views of tensors at fixed addresses are not taken again, and operations whose
results are not read are left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .outside import LeavesTorchError, LeavingTorch

Body = Callable[[], None]
Place = tuple[Any, ...]
UNFIT = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
UNTOLD = {torch.ops.aten.native_batch_norm.default: ("running_mean", "running_var")}
"""Arguments that an operation changes although its signature does not say so."""
UNUSED = "_"  # name of a result that is None
PLAIN = (int, bool, str, type(None))  # types that can be written as Python source


def taped(body: Body) -> Body:
    """Return a replay of a body's operations, or the body if the replay would differ.

    The body runs several times here; its tensors and torch's random state are restored afterwards.
    """
    state = torch.get_rng_state()
    tape = _recorded(body)
    if tape is None:
        torch.set_rng_state(state)
        return body
    replay = tape.function()
    fits = _same(body, replay, tape)
    for tensor, old in tape.begun_with:
        tensor.copy_(old)
    torch.set_rng_state(state)
    return replay if fits else body


def _recorded(body: Body) -> "_Tape | None":
    tape, outside = _Tape(), LeavingTorch()
    try:
        with outside, tape:
            body()
    except (_UnfitError, LeavesTorchError):
        return None
    return None if tape.unfit or outside.left else tape


class _UnfitError(BaseException):
    """A body depends on more than shapes. No Exception, since a body might handle that."""


@dataclass
class _Line:
    op: str
    text: str  # its arguments as source
    reads: set[str]
    gives: list[str]
    kept: bool  # whether it has effects besides its results
    many: bool  # whether it returns a list


class _Tape(TorchDispatchMode):
    """Records the tensor operations that run while it is open."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begun_with: list[tuple[Tensor, Tensor]] = []
        """Each written tensor that existed before, with its old content, the last one first:
        restored in this order all is as before, even where one is a view of another."""
        self._lines: list[_Line] = []
        self._fixed: dict[str, Any] = {}  # by name: operations, and values from before
        self._names: dict[Place, str] = {}
        # Keeps no data, but keeps their places from being reused by other storages.
        self._seen: list[StorageWeakRef] = []
        self.unfit = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch's compiler, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        unfit = any(tag in func.tags for tag in UNFIT) and not _picks_by_number(func, args)
        if unfit or func is torch.ops.aten.lift_fresh.default:  # numbers from Python
            self._refuse()
        reads: set[str] = set()
        text = ", ".join(
            [self._said(a, reads) for a in args]
            + [f"{key}={self._said(a, reads)}" for key, a in kwargs.items()]
        )
        writes = func._schema.is_mutable or func in UNTOLD
        if writes:
            self._keep(_written(func, args, kwargs))
        result = func(*args, **kwargs)
        given = list(result) if isinstance(result, (list, tuple)) else [result]
        found = [each for each in given if each is not None]
        if not all(isinstance(each, Tensor) for each in found):
            if reads:
                self._refuse()
            return result  # such as a type, which depends on no tensor
        if not all(map(_is_plain, found)):
            self._refuse()
        if not writes and _is_view(found, args):
            if all(name in self._fixed for name in reads):
                for each in found:  # its address is fixed
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

    @property
    def text(self) -> str:
        """The recorded operations as the source of a function."""
        # Arguments with defaults are local, and locals are the fastest to look up.
        head = f"def replay({', '.join(f'{name}={name}' for name in self._fixed)}):"
        return "\n    ".join([head, *self._source(), "return None"])

    def function(self) -> Body:
        space = dict(self._fixed)
        exec(self.text, space)
        replay: Body = space.pop("replay")  # popped, since `space` is its globals: no cycle

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

    def agrees(self, other: "_Tape") -> bool:
        """Whether both hold equal operations on the same tensors from before."""
        return self.text == other.text and all(
            _place(a) == _place(b) if isinstance(a, Tensor) else a == b
            for a, b in zip(self._fixed.values(), other._fixed.values(), strict=True)
        )

    def _refuse(self) -> NoReturn:
        self.unfit = True
        raise _UnfitError

    def _said(self, value: Any, reads: set[str]) -> str:
        """Return an argument as source."""
        if isinstance(value, Tensor):
            if not _is_plain(value):
                self._refuse()
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
                    self.begun_with.insert(0, (tensor.detach(), tensor.detach().clone()))

    def _result(self, tensor: Tensor) -> str:
        place = _place(tensor)
        if place not in self._names:
            self._names[place] = f"t{len(self._names)}"
            self._seen.append(StorageWeakRef(tensor.untyped_storage()))
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
    """Whether this is x[i] with no mask in i, so that it depends on shapes alone."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in masks for index in args[1]
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether its place describes a tensor completely."""
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _place(tensor: Tensor) -> Place:
    """Return the address and layout of a tensor: tensors of one place are always equal."""
    with torch._C._DisableTorchDispatch():
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_view(found: Sequence[Tensor], args: Sequence[Any]) -> bool:
    storages = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
    return bool(found) and all(each.untyped_storage()._cdata in storages for each in found)


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes."""
    untold = UNTOLD.get(func, ())
    for k, given in enumerate(func._schema.arguments):
        if given.name in untold or (given.alias_info is not None and given.alias_info.is_write):
            value = kwargs.get(given.name) if given.name in kwargs else args[k]
            several = value if isinstance(value, (list, tuple)) else [value]
            yield from (tensor for tensor in several if tensor is not None)


def _same(body: Body, replay: Body, tape: _Tape) -> bool:
    """Whether the body repeats its operations, and the replay gives the body's results.

    Both start from what the body left behind or, if it cannot run again from there, for example
    without another batch, from its first start.
    """
    state = torch.get_rng_state()
    written = [tensor for tensor, _ in tape.begun_with]
    start = [tensor.clone() for tensor in written]
    try:
        end = _after(body, written, start, state)
    except (RuntimeError, IndexError):
        start = [old for _, old in tape.begun_with]
        end = _after(body, written, start, state)
    for tensor, old in zip(written, start, strict=True):
        tensor.copy_(old)
    again = _recorded(body)
    if again is None or not tape.agrees(again):
        return False
    try:
        replayed = _after(replay, written, start, state)
    except (RuntimeError, IndexError):
        return False
    return all(torch.equal(a, b) for a, b in zip(end, replayed, strict=True))


def _after(
    work: Body, written: Sequence[Tensor], before: Sequence[Tensor], state: Tensor
) -> list[Tensor]:
    for tensor, old in zip(written, before, strict=True):
        tensor.copy_(old)
    torch.set_rng_state(state)
    work()
    return [tensor.clone() for tensor in written]
