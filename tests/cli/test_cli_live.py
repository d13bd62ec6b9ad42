"""`unlatch train --live` and `unlatch show`: what they say, that training is the same, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from commands import Command, same_weights
from run_folders import begin_run, sum_up
from scripts import environment, wait_until
from unlatch.live.server import listening

URL = re.compile(r"http://127\.0\.0\.1:(\d+)/")


def document(port: str | int) -> dict:
    browser = HTTPConnection("127.0.0.1", int(port), timeout=20)
    browser.request("GET", "/document.json")
    return json.loads(browser.getresponse().read())


def test_a_run_that_is_followed_is_the_same_run(unlatch, conf, cut, tmp_path):
    flags = ("--method", "dtr", *cut, "--epochs", 2)
    plain = unlatch("train", conf, *flags, "--out", "plain")
    live = unlatch("train", conf, *flags, "--out", "live", "--live")
    assert (plain.exit_code, live.exit_code) == (0, 0), live.output
    assert same_weights("plain", "live")
    assert len(URL.findall(live.output)) == 1
    assert not (tmp_path / "plain" / "live").exists()
    told = json.loads((tmp_path / "live" / "live" / "rank0.json").read_text())
    assert (told["ended"], told["step"], told["steps"]) == (True, 12, 12)
    assert {event[0] for event in told["events"]} == {0, 1}
    assert [stage["predicted_staleness"] for stage in told["stages"]] == [1.0, 0.0]


def test_machines_read_json_and_people_the_address(unlatch, conf):
    result = unlatch("train", conf, "--live", "--json", "--out", "run")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["status"] == "finished"
    assert len(URL.findall(result.stderr)) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--port", "8000"), "--port is about the page of --live: add --live"),
        (("--beside", "x"), "--beside is about the page of --live: add --live"),
        (("--live", "--beside", "x"), "x: no run there"),
        (("--live", "--port", "70000"), "less than or equal to 65535"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_is_trained(unlatch, conf, flags, said):
    result = unlatch("train", conf, *flags)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not Path("runs").exists()


def test_a_port_in_use_is_an_error_and_leaves_nothing_behind(unlatch, conf):
    begin_run(Path("done"), losses=1)
    with listening() as taken:
        port = taken.getsockname()[1]
        for command in (("train", conf, "--live"), ("show", "done", "--no-browser")):
            result = unlatch(*command, "--port", port)
            assert result.exit_code == 2
            assert result.stderr.startswith(f"error: port {port} of 127.0.0.1 is not to be had: Address already in use")
    assert not Path("runs").exists()


def test_the_page_ends_with_a_run_that_is_killed(greenhouse, conf):
    with Command("train", conf, "--epochs", 1_000_000, "--out", "run", "--live", greenhouse=greenhouse) as command:
        command.wait_until_it_says(URL.pattern)
        port = URL.search(command.said())[1]
        command.wait_until(lambda: document(port)["runs"][0]["status"] == "running", "it does not train")
        os.kill(command.process.pid, signal.SIGKILL)
        # Pages that are open learn of it before the server goes, which it does as soon as they have.
        found: dict = {}
        wait_until(lambda: found.update(document(port)) or found["live"]["closes"], "the server does not notice")
        assert found["runs"][0]["status"] == "lost"
        command.ended()


def test_a_run_that_has_gone_before_its_page_begins_is_no_news(tmp_path):
    with listening() as listener:
        begin = (sys.executable, "-m", "unlatch.live", str(listener.fileno()), str(tmp_path / "gone"))
        done = subprocess.run(
            begin, env=environment(), pass_fds=(listener.fileno(),), input="", capture_output=True, text=True
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_at_once_ends_the_run_and_its_page_in_good_order(conf):
    with Command("train", conf, "--epochs", 1_000_000, "--out", "run", "--live") as command:
        command.wait_until_it_says(URL.pattern)
        command.send(signal.SIGINT, "group")
        code, said = command.ended()
    assert code == 130, said
    assert "Traceback" not in said


def test_show_ends_by_ctrl_c_with_code_0(tmp_path):
    for name in ("one", "two"):
        sum_up(begin_run(tmp_path / name, losses=3), steps=3)
    with Command("show", "one", "two", "--no-browser") as command:
        command.wait_until_it_says(URL.pattern)
        assert [run["status"] for run in document(URL.search(command.said())[1])["runs"]] == ["finished", "finished"]
        command.send(signal.SIGINT, "launcher")
        code, said = command.ended()
    assert code == 0, said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("inside", [None, "empty", "other"])
def test_show_refuses_what_is_no_run(unlatch, tmp_path, inside):
    if inside is not None:
        (tmp_path / "x").mkdir()
    if inside == "other":
        (tmp_path / "x" / "notes.txt").write_text("hello")
    result = unlatch("show", "x", "--no-browser")
    assert result.exit_code == 2
    assert result.stderr == "error: x: no run there; expected the folder of a run, such as runs/dtr-1\n"
