"""The server of the page: what it answers, to whom, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import subprocess
import sys
from http.client import HTTPConnection

import pytest

from run_folders import add_row, begin_run, sum_up, tell
from scripts import environment
from unlatch.errors import ConfigError
from unlatch.io.run_folder import RunFolder
from unlatch.live.document import Watch, serving
from unlatch.live.server import Answer, PageServer, listening


@pytest.fixture
def folder(tmp_path):
    return begin_run(tmp_path / "dtr-1", losses=12, epochs=2)


@pytest.fixture
def server(folder):
    with serving(listening(), Watch([folder])) as server:
        yield server


def ask(server, path="/", method="GET", host=None, **headers):
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.putrequest(method, path, skip_host=host is not None)
    for name, value in ([("Host", host)] if host else []) + list(headers.items()):
        connection.putheader(name, value)
    connection.endheaders()
    with contextlib.closing(connection):
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def document(server) -> dict:
    status, _, text = ask(server, "/document.json")
    assert status == 200
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_page_runs_only_what_it_came_with(server):
    status, headers, html = ask(server)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "document.json" in html


def test_every_answer_is_guarded(server):
    for path in ("/", "/document.json", "/nothing"):
        headers = ask(server, path)[1]
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_it_listens_on_loopback_only(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1:1234", "localhost:9", "LOCALHOST", "127.0.0.1"])
def test_names_of_this_machine_are_answered_whatever_the_port_of_a_tunnel(server, host):
    assert ask(server, host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[", "x@evil.example"])
def test_a_name_that_somebody_else_lets_point_here_is_refused(server, host):
    for path in ("/", "/document.json"):
        status, _, text = ask(server, path, host=host)
        assert status == 421
        assert "127.0.0.1" in text
        assert "dtr" not in text


def test_a_request_without_a_host_or_with_two_is_refused(server):
    for named in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection(server.server_address, timeout=10) as line:
            line.sendall(b"GET / HTTP/1.1\r\n" + named + b"\r\n")
            assert line.recv(100).startswith(b"HTTP/1.0 421")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_it_is_only_read(server, method):
    status, headers, _ = ask(server, "/document.json", method)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    ["/../versions.json", "/versions.json", "/%2e%2e/config.toml", "//etc/passwd", "/document.json/..", "/web/", "*"],
)
def test_no_path_leaves_the_few_that_there_are(server, path):
    status, _, text = ask(server, path)
    assert status == 404
    assert "0.1.0" not in text


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"G" * 70_000 + b"\r\n"]
)
def test_what_is_no_request_is_refused_in_silence(server, sent, capfd):
    with socket.create_connection(server.server_address, timeout=10) as line, contextlib.suppress(ConnectionError):
        line.sendall(sent)
        assert b"Traceback" not in line.recv(1000)
    assert ask(server)[0] == 200
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_browser_that_hangs_up_is_no_news(server, capfd):
    for _ in range(5):
        with socket.create_connection(server.server_address, timeout=10) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            line.sendall(b"GET /document.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert ask(server)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_defect_is_one_line(capfd):
    def broken() -> Answer:
        raise TypeError("of ours")

    with PageServer(listening(), {"/": broken}) as server, contextlib.suppress(Exception):
        ask(server)
    said = capfd.readouterr().err
    assert said.splitlines() == ["the page: TypeError: of ours"]


def test_a_port_in_use_is_said(server):
    with pytest.raises(ConfigError, match=r"port \d+ of 127.0.0.1 is not to be had: Address already in use"):
        listening(server.server_address[1])


# ---------------------------------------------------------------- documents


def test_a_run_under_way(folder):
    with RunFolder.resume(folder):
        tell(folder, 0)
        tell(folder, 1)
        with serving(listening(), Watch([folder])) as server:
            found = document(server)
    (run,) = found["runs"]
    assert found["live"]["every"] == 1000
    assert (run["label"], run["status"]) == ("dtr-1", "running")
    assert run["progress"] == {"share": 0.12, "text": "epoch 3 of 5, batch 12 of 100"}
    assert run["timeline"]["rows"] == ["stage 0", "stage 1"]
    assert len(run["curves"]["training loss"]["points"]) == 12
    assert run["curves"]["test accuracy"]["points"][-1][1] == pytest.approx(0.7)
    assert [stage["predicted"] for stage in run["stages"]] == [1.0, 1.0]


@pytest.mark.parametrize("ended", [False, True])
def test_kinds_of_action_that_only_a_method_knows_are_named(folder, ended):
    kinds = {"Qx": "auxiliary", "D9": "none"}
    events = [[0, kind, n, 0, 0.1 * n, 0.1 * n + 0.05, 0] for n, kind in enumerate(list(kinds) * 5)]
    names = ("stage", "kind", "batch", "version", "start", "end", "bytes")
    if ended:
        sum_up(folder, steps=12, kinds=kinds)
        lines = [json.dumps(dict(zip(names, event, strict=True))) + "\n" for event in events]
        (folder / "events.jsonl").write_text("".join(lines))
    else:
        tell(folder, 0, events=events, kinds=kinds)
    with serving(listening(), Watch([folder])) as server:
        (run,) = document(server)["runs"]
    assert {kind["kind"]: (kind["cost"], kind["words"]) for kind in run["timeline"]["kinds"]} == {
        "Qx": ("auxiliary", "auxiliary (Qx)"),
        "D9": ("other", "other (D9)"),
    }


def test_what_is_not_finite_is_null(folder):
    add_row(folder, 13, {"train/loss": math.nan, "eval/accuracy": math.inf, "epoch/number": 3})
    with serving(listening(), Watch([folder])) as server:
        (run,) = document(server)["runs"]
    assert run["curves"]["training loss"]["points"][-1][1] is None


def test_two_runs_beside_each_other_are_told_apart(tmp_path):
    folders = [begin_run(tmp_path / name / "dtr-1", losses=3) for name in ("mine", "yours")]
    sum_up(folders[1], steps=3)
    with serving(listening(), Watch(folders)) as server:
        found = document(server)
    assert [(run["label"], run["status"]) for run in found["runs"]] == [
        ("mine/dtr-1", "lost"),
        ("yours/dtr-1", "finished"),
    ]
    assert found["title"] == "mine/dtr-1 beside yours/dtr-1"


def test_the_same_run_twice_is_refused(folder):
    with pytest.raises(ConfigError, match="named twice"):
        Watch([folder, folder])


def test_a_run_that_goes_away_is_shown_as_such(server, folder, monkeypatch):
    monkeypatch.setattr("unlatch.live.document._SAME", 0.0)
    assert document(server)["runs"][0]["status"] == "lost"
    shutil.rmtree(folder)
    (run,) = document(server)["runs"]
    assert run["status"] == "gone"
    assert run["warnings"] == ["its folder is no longer there"]
    assert run["curves"]


def test_the_last_document_says_so_and_how_to_come_back(folder):
    watch = Watch([folder])
    with serving(listening(), watch) as server:
        assert document(server)["live"] == {"closes": False, "again": f"unlatch show {folder}", "every": 5000}
        watch.close("rank 1 was killed")
        found = document(server)
    assert found["live"]["closes"]
    assert "rank 1 was killed" in found["runs"][0]["warnings"]


def test_serving_imports_neither_torch_nor_matplotlib(folder):
    look = (
        "import sys; from pathlib import Path; from unlatch.live.document import Watch; "
        "from unlatch.live.server import listening; from unlatch.live.document import serving; "
        "import unlatch.live.beside, unlatch.live.__main__; "
        "watch = Watch([Path(sys.argv[1])]); watch.text(); serving(listening(), watch); "
        "print([name for name in ('torch', 'matplotlib', 'scipy', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, str(folder)], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
