"""`trgp watch`: the report page of a folder, while its runs go on."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from ..engine.errors import InputError
from .parsing import parse


@dataclass(frozen=True)
class Watch:
    """Serve the report of a folder to a browser on this computer, progress included."""

    folder: Annotated[str, arg(metavar="DIR"), Positional] = "runs"
    """The folder that is the runs' --out."""
    port: Annotated[int, arg(metavar="PORT")] = 8420
    """Where the page is served (0: anywhere that is free)."""


def main(argv: Sequence[str]) -> None:
    asked = parse(Watch, argv, "trgp watch")
    # Here, because other commands need neither.
    from ..report.live import Folder
    from ..report.server import Server

    if not os.path.isdir(asked.folder):
        raise InputError(f"There is no folder {asked.folder}; give the --out of the runs.")
    with Server(Folder(asked.folder), asked.port) as server:
        print(f"{asked.folder} is shown at {server.address} until Ctrl-C.", flush=True)
        with suppress(KeyboardInterrupt):  # the usual end
            server.serve_forever()
