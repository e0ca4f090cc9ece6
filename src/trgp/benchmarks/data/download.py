"""Download one file from the first mirror that has it: resume, verify, rename."""

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .sources import Remote

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes received, and the total bytes if known."""

ATTEMPTS = 5  # per mirror, each resuming the previous one
PAUSE = 1.0  # seconds before the second attempt, growing with each
TIMEOUT = 60.0  # seconds without a byte
BLOCK = 1 << 18
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class _BrokenOffError(Exception):
    """The connection ended early; the received part is kept, and another attempt may resume it."""

    def __init__(self, reason: str, *, connected: bool = True) -> None:
        super().__init__(reason)
        self.connected = connected


class _RefusedError(Exception):
    """The mirror lacks the file or has a wrong one; another mirror may have it."""


def fetch(remote: Remote, folder: Path, progress: Progress | None = None) -> Path:
    """Return the file in the folder, downloading it unless it exists and is valid.

    Bytes collect in `<file>.part`, which survives a broken download so that the next one resumes.
    """
    target, part = folder / remote.file, folder / f"{remote.file}.part"
    if target.is_file():
        if wrong(target, remote) is None:
            return target
        target.unlink()
    reasons = []
    for url in remote.urls:
        try:
            _from_mirror(url, remote, part, progress)
        except _RefusedError as error:
            reasons.append(f"{url}: {error}")
        else:
            os.replace(part, target)
            return target
    raise ConnectionError(f"{remote.file} could not be downloaded ({'; '.join(reasons)})")


def wrong(path: Path, remote: Remote) -> str | None:
    """Describe how the file differs from the published one; None if no difference is known."""
    if remote.size is not None and path.stat().st_size != remote.size:
        return f"it has {path.stat().st_size} bytes in place of {remote.size}"
    for kind, expected in (("sha256", remote.sha256), ("md5", remote.md5)):
        if expected is None:
            continue
        with open(path, "rb") as file:
            # Declared, because some systems forbid md5 for security purposes.
            made = hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False))
        if made.hexdigest() != expected:
            return f"its {kind} is {made.hexdigest()} in place of {expected}"
    return None


def _from_mirror(url: str, remote: Remote, part: Path, progress: Progress | None) -> None:
    """Fill the part file and verify it, in at most ATTEMPTS attempts."""
    for attempt in range(1, ATTEMPTS + 1):
        resumed = part.is_file() and part.stat().st_size > 0
        try:
            _attempt(url, remote.file, part, progress)
        except _BrokenOffError as error:
            # Leave an unreachable mirror at once, but retry after a broken connection.
            if attempt == ATTEMPTS or (attempt == 1 and not error.connected):
                raise _RefusedError(str(error)) from None
            time.sleep(PAUSE * attempt)
            continue
        reason = wrong(part, remote)
        if reason is None:
            return
        part.unlink()
        # An older or another mirror's bytes may be the cause: retry from the start.
        if not resumed:
            raise _RefusedError(reason)
    raise _RefusedError("the connection kept breaking")


def _attempt(url: str, name: str, part: Path, progress: Progress | None) -> None:
    """Request the bytes that the part file lacks."""
    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "trgp"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT
        )
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # no bytes beyond the part file: it is complete, or too long
                return
            raise _RefusedError(f"the server answered {error.code}") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        raise _BrokenOffError(f"no connection, {reason}", connected=False) from None
    with response:
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        if response.status == 206:
            found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != have:
                raise _RefusedError("the server sent another part of the file than requested")
            total = int(found[2]) if found[2].isdecimal() else None
        else:  # the server sends the whole file
            have = 0
        with open(part, "ab" if have else "wb") as file:
            while True:
                # Separate from the writing below: a full disk is no reason to try the next mirror.
                try:
                    block = response.read(BLOCK)
                except (http.client.HTTPException, OSError) as error:
                    raise _BrokenOffError(f"the connection broke, {error}") from None
                if not block:
                    break
                file.write(block)
                have += len(block)
                if progress is not None:
                    progress(name, have, total)
    if total is not None and have < total:
        raise _BrokenOffError(f"the connection ended after {have} of {total} bytes")
