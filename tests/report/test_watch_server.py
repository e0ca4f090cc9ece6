"""The live page's server: three routes for this computer alone."""

import json
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from some_checkpoints import a_checkpoint

from trgp.engine.errors import InputError
from trgp.report import live
from trgp.report.live import Folder
from trgp.report.server import Handler, Server

RECORDS = Path(__file__).parent.parent.parent / "records" / "runs"
RUN = Path("split-digits", "gpm", "paper", "seed-0", "result.json")


def add(out: Path, run: Path = RUN) -> None:
    """A result that a real run has left."""
    (out / run).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(RECORDS / run, out / run)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    add(tmp_path)
    with Server(Folder(tmp_path), 0) as started:
        thread = Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def ask(
    server: Server, path: str, method: str = "GET", host: str = "", **headers: str
) -> tuple[HTTPResponse, bytes]:
    port = server.server_address[1]
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def told(server: Server, path: str) -> Any:
    answer, body = ask(server, path)
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "application/json"
    return json.loads(body)


def test_the_page_and_its_data(server: Server, tmp_path: Path) -> None:
    answer, body = ask(server, "/?whatever")
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "text/html; charset=utf-8"
    assert answer.getheader("Cache-Control") == "no-store"
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert body.startswith(b"<!doctype html>")
    a_checkpoint(tmp_path)
    report, progress = told(server, "/report.json"), told(server, "/progress.json")
    assert any(row.get("method") == "gpm" for table in report["tables"] for row in table["rows"])
    (run,) = progress["runs"]
    assert (run["task"], run["tasks"], run["saved"], run["waiting"]) == (2, 4, "just now", False)
    assert progress["charts"][0]["series"][0]["y"] == [50, 60, 70, None, 50]


def test_the_address_is_of_this_computer_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/%2e%2e/result.json",
        f"/{RUN}",
        "/report.json/",
        "/page.js",
        "http://127.0.0.1/",
        "*",
        "/\x7f<script>",
    ],
)
def test_no_path_leads_to_a_file(server: Server, path: str) -> None:
    answer, body = ask(server, path.replace("\x7f", "%7f"))
    assert answer.status == 404
    assert body == b"There is no such page; open / instead.\n"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8420", "127.0.0.1.evil.example:1", "[::1]:80", ":80"]
)
def test_another_name_for_this_computer_is_refused(server: Server, host: str) -> None:
    for path in ("/", "/report.json", "/progress.json"):
        answer, body = ask(server, path, host=host)
        assert answer.status == 403
        assert b"split-digits" not in body


def test_names_of_this_computer_at_any_port(server: Server) -> None:
    for host in ("localhost", "localhost:1", "127.0.0.1"):
        assert ask(server, "/", host=host)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    assert ask(server, "/", method)[0].status == 501


def test_a_report_is_built_when_results_change(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(live, "build", lambda found: built.append(found) or _report(found))
    first = told(server, "/progress.json")["report"]
    report = told(server, "/report.json")
    assert told(server, "/report.json") == report
    a_checkpoint(tmp_path)
    assert told(server, "/progress.json")["report"] == first
    assert len(built) == 1
    add(tmp_path, RUN.parent.parent / "seed-1" / "result.json")
    assert told(server, "/progress.json")["report"] != first
    assert told(server, "/report.json") != report
    assert len(built) == 2
    (tmp_path / RUN).unlink()
    told(server, "/report.json")
    assert len(built) == 3


def test_a_run_without_news_is_said_to_wait(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_checkpoint(tmp_path)
    now = live.time.time()
    monkeypatch.setattr(live.time, "time", lambda: now + 600)
    (run,) = told(server, "/progress.json")["runs"]
    assert run["waiting"]
    assert run["saved"].startswith("10 min")


def test_of_runs_at_once_each_has_a_share_of_the_time(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an epoch of one takes as long as one of all of them."""
    for seed in range(200):
        a_checkpoint(tmp_path, (1,), seed=seed)
    now = live.time.time()
    monkeypatch.setattr(live.time, "time", lambda: now + 600)
    assert not any(run["waiting"] for run in told(server, "/progress.json")["runs"])


def test_a_port_that_is_taken(server: Server, tmp_path: Path) -> None:
    port = server.server_address[1]
    with pytest.raises(InputError, match=rf"^Port {port} is taken; give another --port, .*\.$"):
        Server(Folder(tmp_path), port)
    for wrong in (-1, 65536):
        with pytest.raises(InputError, match="from 0 to 65535"):
            Server(Folder(tmp_path), wrong)


def connected(server: Server, timeout: float = 20) -> socket.socket:
    return socket.create_connection(server.server_address[:2], timeout=timeout)


def test_many_that_come_at_once_are_answered(tmp_path: Path) -> None:
    """Also before the server has come to any of them."""
    with Server(Folder(tmp_path), 0) as server, ExitStack() as ends:
        clients = [ends.enter_context(connected(server, timeout=2)) for _ in range(100)]
        for client in clients:
            client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            for client in clients:
                client.settimeout(20)
                assert client.recv(16) == b"HTTP/1.0 200 OK\r"
        finally:
            server.shutdown()
            thread.join()


def test_a_client_that_drips_is_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte at a time, each well before any limit on waiting for one."""
    monkeypatch.setattr(Handler, "timeout", 1)
    deadline = time.monotonic() + 20
    with connected(server) as client:
        client.sendall(b"GET / HTTP/1.0\r\nX: ")
        with suppress(ConnectionError):
            while time.monotonic() < deadline:
                client.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < deadline


def test_an_answer_may_take_longer_than_a_question(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "timeout", 1)
    monkeypatch.setitem(server.routes, "/", ("text/plain", lambda: time.sleep(2) or "at last"))
    assert ask(server, "/")[1] == b"at last"


def test_of_too_many_connections_the_first_are_dropped(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "most", 10)
    before = threading.active_count()
    with ExitStack() as ends:
        silent = []
        for _ in range(100):
            silent.append(ends.enter_context(connected(server)))
            assert threading.active_count() - before <= 2 * Server.most
        assert ask(server, "/")[0].status == 200
        assert silent[0].recv(1) == b""
        silent[-1].sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert silent[-1].recv(8) == b"HTTP/1.0"


def test_connections_that_are_reset_are_no_failure(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for said in (b"", b"GET / HT", b"GET / HTTP/1.0\r\nHost: "):
        with connected(server) as client:
            client.sendall(said)
            # To be closed by a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ask(server, "/")[0].status == 200
    _ended()
    assert capsys.readouterr() == ("", "")


def test_a_mistake_of_the_servers_own_is_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(server.routes, "/", ("text/plain", lambda: 1 / 0))
    with pytest.raises(ConnectionError):
        ask(server, "/")
    _ended()
    assert "ZeroDivisionError" in capsys.readouterr().err


def _ended() -> None:
    """Wait for the threads of all connections."""
    for thread in threading.enumerate():
        if "process_request" in thread.name:
            thread.join(timeout=20)


def _report(found: Any) -> Any:
    from trgp.report.build import build

    return build(found)
