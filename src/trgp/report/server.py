"""The live page on this computer alone: three routes, read only."""

import errno
import math
import os
import socket
import socketserver
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from ..engine.errors import InputError
from .live import Folder

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""What a browser may know this computer by; another name is of a site that points here."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(socketserver.ThreadingTCPServer):
    """Answers to this computer, for as long as `serve_forever` runs."""

    allow_reuse_address = os.name == "posix"  # elsewhere two could share a port
    daemon_threads = True
    request_queue_size = 128
    most = 256  # connections at once; of those dropped as many again may still be ending

    def __init__(self, folder: Folder, port: int) -> None:
        html, data = "text/html; charset=utf-8", "application/json"
        self.routes: dict[str, tuple[str, Callable[[], str]]] = {
            "/": (html, lambda: folder.page),
            "/report.json": (data, folder.report),
            "/progress.json": (data, folder.progress),
        }
        # Until when each question must be there, as they came, one a thread. Threads share it, and
        # every operation on it is whole.
        self._open: dict[socket.socket, float] = {}
        if not 0 <= port <= 65535:
            raise InputError(f"--port must be from 0 to 65535, not {port}.")
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"fails: {error.strerror}"
            raise InputError(
                f"Port {port} {reason}; give another --port, or --port 0 for any that is free."
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        while len(self._open) >= 2 * self.most:
            time.sleep(0.01)  # until threads of those dropped have ended; others queue up meanwhile
        self._open[request] = time.monotonic() + Handler.timeout
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Drop who asks too slowly and, where there are too many, who came first."""
        now, held = time.monotonic(), [*self._open.items()]
        for place, (request, until) in enumerate(held):
            if until < now or len(held) - place > self.most:
                with suppress(OSError):  # it ends already
                    request.shutdown(socket.SHUT_RDWR)  # which its thread notices

    def has_asked(self, request: socket.socket) -> None:
        """The question is there; its answer may take its time."""
        if request in self._open:
            self._open[request] = math.inf

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has gone is no failure; all else is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """One question; whatever has no route is refused, and no path is ever opened."""

    server: Server
    timeout = 30  # seconds that a question may take to arrive, and an answer to be taken

    def do_GET(self) -> None:
        self.server.has_asked(self.connection)
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in NAMES:
            return self._answer(403, "text/plain", f"Ask for {self.server.address} instead.\n")
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            return self._answer(404, "text/plain", "There is nothing here; ask for / instead.\n")
        kind, content = route
        self._answer(200, kind, content())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for what the user must know."""

    def version_string(self) -> str:
        return "trgp"

    def _answer(self, status: int, kind: str, content: str) -> None:
        body = content.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
