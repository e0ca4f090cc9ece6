"""`trgp watch`: serve the report page of a folder while its runs are in progress."""

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
    """Serve the report of a folder, with progress, to a browser on this computer."""

    folder: Annotated[str, arg(metavar="DIR"), Positional] = "runs"
    """The --out folder of the runs."""
    port: Annotated[int, arg(metavar="PORT")] = 8420
    """The port of the page (0: any free one)."""


def main(argv: Sequence[str]) -> None:
    asked = parse(Watch, argv, "trgp watch")
    # Imported here, because no other command needs them.
    from ..report.live import Folder
    from ..report.server import Server

    if not os.path.isdir(asked.folder):
        raise InputError(f"There is no folder {asked.folder}; give the --out folder of the runs.")
    with Server(Folder(asked.folder), asked.port) as server:
        print(f"{asked.folder} is shown at {server.address} until Ctrl-C.", flush=True)
        with suppress(KeyboardInterrupt):  # the usual end
            server.serve_forever()
