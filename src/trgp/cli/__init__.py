"""The command line: `trgp run`, and what shows its results."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from ..engine.errors import InputError, RunError
from ..lookup import meant

COMMANDS = {
    "run": (".run:main", "learn a benchmark by a method, or go on where that was interrupted"),
    "sweep": (".sweep:main", "many runs side by side, and the table they come to"),
    "list": (".listing:main", "benchmarks, methods or presets"),
    "table": (".results:table", "what all stored runs came to"),
    "show": (".results:show_run", "all that is known of a run"),
    "compare": (".results:compare", "two runs against each other"),
    "report": (".report:main", "tables, figures and a page of stored runs"),
    "watch": (".watch:main", "the report in a browser while runs go on"),
    "data": (".data:main", "list or prepare image sets"),
}
HELP = f"""usage: trgp COMMAND ...

Continual learning by gradient projection.

{"".join(f"  {name:<9} {says}{chr(10)}" for name, (_, says) in COMMANDS.items())}
`trgp COMMAND --help` says more. A first run: trgp run permuted-digits --tasks 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0 if it is done, 2 for bad input, 1 for a run that failed, 130 for Ctrl-C."""
    try:
        try:
            _dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is expected
    except InputError as error:
        return _said(error, 2)
    except RunError as error:
        return _said(error, 1)
    except KeyboardInterrupt as error:
        return _said(str(error) or "Interrupted.", 130)
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python must not flush the rest into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _said(f"The output could not be written: {error.strerror or error}.", 1)
    except SystemExit as end:
        if end.code:  # not of help, but of a user's module
            raise
    return 0


def entry() -> None:
    """The program `trgp`."""
    if isinstance(sys.stdout, TextIOWrapper):  # a letter that a terminal lacks shall end no run
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())


def _dispatch(argv: Sequence[str]) -> None:
    match argv:
        case ["-h" | "--help", *_]:
            print(HELP, end="")
        case ["--version", *_]:
            from ..types import VERSION  # with torch, which takes a second

            print(f"trgp {VERSION}")
        case [name, *rest] if name in COMMANDS:
            _imported(COMMANDS[name][0])(rest)
        case [name, *_]:
            raise InputError(f"There is no command '{name}'; {meant(name, COMMANDS)}")
        case _:
            raise InputError("trgp needs a command; see `trgp --help`.")


def _imported(path: str) -> Callable[[Sequence[str]], None]:
    """A command's function; Ctrl-C while it is imported, torch with it, ends the program at once.

    In the middle of an import an exception may be lost, or leave a traceback.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not where it is ignored, as in a background job
        signal.signal(signal.SIGINT, _end)
    module, _, name = path.partition(":")
    command: Callable[[Sequence[str]], None] = getattr(import_module(module, __name__), name)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, usual)
    return command


def _end(_: int, __: FrameType | None) -> NoReturn:
    os.write(2, b"trgp: Interrupted.\n")
    os._exit(130)


def _said(message: object, code: int) -> int:
    from .screen import tell  # not before Ctrl-C is looked after: it imports much

    tell(message)
    return code
