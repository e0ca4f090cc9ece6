"""Serve the live page to this computer only: three routes, read only."""

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
"""Allowed Host headers; any other may be DNS rebinding by a foreign site."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(socketserver.ThreadingTCPServer):
    """Answer this computer's requests while `serve_forever` runs."""

    allow_reuse_address = os.name == "posix"  # elsewhere two servers could share a port
    daemon_threads = True
    request_queue_size = 128
    most = 256  # open connections; as many dropped ones may still be closing

    def __init__(self, folder: Folder, port: int) -> None:
        html, data = "text/html; charset=utf-8", "application/json"
        self.routes: dict[str, tuple[str, Callable[[], str]]] = {
            "/": (html, lambda: folder.page),
            "/report.json": (data, folder.report),
            "/progress.json": (data, folder.progress),
        }
        # Deadline of each request, in order of arrival, one per thread. Threads share it;
        # every operation on it is atomic.
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
            time.sleep(0.01)  # until threads of dropped requests end; others queue up meanwhile
        self._open[request] = time.monotonic() + Handler.timeout
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Drop requests that arrive too slowly and, if there are too many, the oldest."""
        now, held = time.monotonic(), [*self._open.items()]
        for place, (request, until) in enumerate(held):
            if until < now or len(held) - place > self.most:
                with suppress(OSError):  # already closed
                    request.shutdown(socket.SHUT_RDWR)  # its thread notices this

    def has_asked(self, request: socket.socket) -> None:
        """Lift the deadline of a request that has arrived; its answer may take longer."""
        if request in self._open:
            self._open[request] = math.inf

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections; report all other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """Answer one request; unknown routes are refused, and no path is ever opened."""

    server: Server
    timeout = 30  # seconds for a request to arrive, and for an answer to be read

    def do_GET(self) -> None:
        self.server.has_asked(self.connection)
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in NAMES:
            return self._answer(403, "text/plain", f"Open {self.server.address} instead.\n")
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            return self._answer(404, "text/plain", "There is no such page; open / instead.\n")
        kind, content = route
        self._answer(200, kind, content())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, to keep the terminal for messages to the user."""

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
