"""The command line: `trgp run` and the commands that show its results."""

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
    "run": (".run:main", "learn a benchmark with a method, or resume an interrupted run"),
    "sweep": (".sweep:main", "run many configurations and show one table of their results"),
    "list": (".listing:main", "list benchmarks, methods or presets"),
    "table": (".results:table", "show the results of all stored runs"),
    "show": (".results:show_run", "show everything stored about a run"),
    "compare": (".results:compare", "compare two configurations"),
    "report": (".report:main", "write tables, figures and a page from stored runs"),
    "watch": (".watch:main", "serve the report in a browser while runs are in progress"),
    "data": (".data:main", "list or prepare image sets"),
}
HELP = f"""usage: trgp COMMAND ...

Continual learning by gradient projection.

{"".join(f"  {name:<9} {says}{chr(10)}" for name, (_, says) in COMMANDS.items())}
`trgp COMMAND --help` shows its options. A first run: trgp run permuted-digits --tasks 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 1 for a failed run, 2 for bad input, 130 for Ctrl-C."""
    try:
        try:
            _dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is caught below
    except InputError as error:
        return _said(error, 2)
    except RunError as error:
        return _said(error, 1)
    except KeyboardInterrupt as error:
        return _said(str(error) or "Interrupted.", 130)
    except BrokenPipeError:
        # The reader closed the pipe; without this, Python fails again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _said(f"The output could not be written: {error.strerror or error}.", 1)
    except SystemExit as end:
        if end.code:  # raised by a user's module; --help exits with 0
            raise
    return 0


def entry() -> None:
    """Run the program `trgp`."""
    if isinstance(sys.stdout, TextIOWrapper):  # a character the terminal lacks must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())


def _dispatch(argv: Sequence[str]) -> None:
    match argv:
        case ["-h" | "--help", *_]:
            print(HELP, end="")
        case ["--version", *_]:
            from ..types import VERSION  # imports torch, which takes a second

            print(f"trgp {VERSION}")
        case [name, *rest] if name in COMMANDS:
            _imported(COMMANDS[name][0])(rest)
        case [name, *_]:
            raise InputError(f"There is no command '{name}'; {meant(name, COMMANDS)}")
        case _:
            raise InputError("trgp needs a command; see `trgp --help`.")


def _imported(path: str) -> Callable[[Sequence[str]], None]:
    """Import a command's function; Ctrl-C during the import of torch ends the program at once.

    An exception raised in the middle of an import may be lost, or leave a traceback.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # a background job may ignore it; leave that alone
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
    from .screen import tell  # imported late, after Ctrl-C is handled: it imports much

    tell(message)
    return code
