"""Signals: what a process makes of them, and what reaches ranks through their launcher."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

import unlatch
from rank_jobs import differences
from restart_jobs import session
from scripts import PATIENCE, TORCHRUN, environment, runs, wait_until
from unlatch.errors import Interrupted
from unlatch.transport import signals
from unlatch.transport.signals import heeding_signals

BOTH = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_is_handed_over_once_and_handlers_come_back(number):
    before = [signal.getsignal(n) for n in BOTH]
    heard = []
    with heeding_signals(heard.append):
        for n in [number, number, *BOTH]:
            signal.raise_signal(n)
    assert heard == [number]
    assert [signal.getsignal(n) for n in BOTH] == before


def test_a_second_signal_ends_a_process_alone(monkeypatch):
    monkeypatch.setattr(signals, "_SAME_REQUEST", 0.0)
    heard = []
    with heeding_signals(heard.append):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGTERM]
    assert caught.value.code == 130


def test_threads_leave_signals_alone():
    before = [signal.getsignal(n) for n in BOTH]
    seen = []

    def other():
        with heeding_signals(lambda number: None):
            seen.extend(signal.getsignal(n) for n in BOTH)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == before


def test_interrupted_travels_between_processes():
    error = pickle.loads(pickle.dumps(Interrupted(signal.SIGTERM)))
    assert (error.code, error.number) == (143, 15)


class Launched:
    """A script that launches two ranks, in a session of its own: signals to its group stay there.

    **Arguments:**

    - `torchrun`: the command that launches them instead.
    - `greenhouse`: where it has imported already; for tests that are about what comes later.
    """

    def __init__(self, folder, job, torchrun=(), greenhouse=None):
        script = folder / "script.py"
        call = f"signal_jobs.{job}(sys.argv[1])"
        script.write_text(
            "import signal, sys\nimport signal_jobs, torch, unlatch\n"
            "if __name__ == '__main__':\n"
            "    torch.set_num_threads(1)\n"
            "    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without it\n"
            f"    {call if torchrun else f'unlatch.launch(signal_jobs.{job}, 2, args=(sys.argv[1],))'}\n"
        )
        self.folder = folder
        self.says = folder / "says"
        with self.says.open("w") as file:
            if greenhouse is not None:
                self.process = greenhouse.program([str(script), str(folder)], environment(), 1, file.fileno())
            else:
                command = [sys.executable, *torchrun, str(script), str(folder)]
                self.process = subprocess.Popen(command, env=environment(), stderr=file, start_new_session=True)

    def noted(self, name):
        """What both ranks have written down under this name."""
        notes = [self.folder / f"{name}{rank}" for rank in range(2)]
        wait_until(lambda: all(note.exists() for note in notes), f"no notes of {name}")
        return [note.read_text() for note in notes]

    def pids(self):
        return [int(pid) for pid in self.noted("pid")]

    def send(self, number, target):
        if target == "group":
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid if target == "launcher" else self.pids()[1], number)

    def ended(self):
        """Wait for the end. **Returns:** the exit code and what was said."""
        self.process.wait(PATIENCE)
        wait_until(lambda: not self.members(), "processes are left behind")
        return self.process.returncode, self.says.read_text()

    def members(self):
        return [pid for pid in psutil.pids() if session_of(pid) == self.process.pid and runs(pid)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


def session_of(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.mark.parametrize(("target", "number"), [("launcher", signal.SIGINT), ("rank", signal.SIGTERM)])
def test_ranks_that_heed_save_before_they_end(greenhouse, tmp_path, target, number):
    with Launched(tmp_path, "heeds", greenhouse=greenhouse) as launched:
        launched.pids()
        launched.send(number, target)
        code, said = launched.ended()
    assert code == CODES[number]
    assert len(said.splitlines()) <= 1
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


@pytest.mark.parametrize(
    ("target", "number"),
    [("launcher", signal.SIGTERM), ("rank", signal.SIGINT), ("group", signal.SIGTERM), ("group", signal.SIGINT)],
)
def test_a_session_saves_and_continues_as_if_nothing_had_been(greenhouse, tmp_path, target, number):
    with Launched(tmp_path, "trains", greenhouse=greenhouse) as launched:
        launched.pids()
        launched.send(number, target)
        code, said = launched.ended()
    assert code == CODES[number]
    assert "Traceback" not in said
    check_that_it_continues(tmp_path)


def test_a_session_under_torchrun(tmp_path):
    """torchrun has its own exit code and its own tracebacks; the ranks have none."""
    with Launched(tmp_path, "trains", TORCHRUN) as launched:
        launched.pids()
        launched.send(signal.SIGTERM, "launcher")
        code, said = launched.ended()
    assert code == 1
    assert "SignalException" in said
    assert "[rank" not in said
    assert "terminate called" not in said, "the interpreter ended with connections open"
    check_that_it_continues(tmp_path)


def check_that_it_continues(tmp_path):
    [saved] = {path.resolve().name for path in (tmp_path / "checkpoints").glob("latest")}
    assert 4 <= int(saved.removeprefix("step-")) < 30
    assert differences(session("dtrp", None), session("dtrp", str(tmp_path / "checkpoints"))) == []


@pytest.mark.parametrize(("target", "number"), [("launcher", signal.SIGINT), ("group", signal.SIGTERM)])
def test_ranks_that_heed_nothing_end_at_once(greenhouse, tmp_path, target, number):
    with Launched(tmp_path, "heeds_nothing", greenhouse=greenhouse) as launched:
        launched.pids()
        launched.send(number, target)
        code, said = launched.ended()
    assert (code, said) == (CODES[number], "")


def test_a_signal_to_a_rank_that_heeds_nothing_is_none(greenhouse, tmp_path):
    with Launched(tmp_path, "heeds_nothing", greenhouse=greenhouse) as launched:
        _, above = launched.pids()
        os.kill(above, signal.SIGTERM)
        os.kill(above, signal.SIGINT)
        time.sleep(0.5)
        assert runs(above)
        launched.send(signal.SIGTERM, "launcher")
        assert launched.ended() == (143, "")


@pytest.mark.parametrize("target", ["launcher", "rank", "group"])
def test_a_second_signal_ends_all_at_once(greenhouse, tmp_path, target):
    with Launched(tmp_path, "hears_and_goes_on", greenhouse=greenhouse) as launched:
        launched.pids()
        launched.send(signal.SIGTERM, "group")
        assert launched.noted("heard") == ["15", "15"]
        time.sleep(signals._SAME_REQUEST)
        assert launched.process.poll() is None, "one request was taken for two"
        launched.send(signal.SIGINT, target)
        code, said = launched.ended()
    assert code == 130
    assert len(said.splitlines()) <= 1


@pytest.mark.parametrize(
    ("target", "number"), [("launcher", signal.SIGTERM), ("group", signal.SIGTERM), ("group", signal.SIGINT)]
)
@pytest.mark.parametrize("delay", [0.0, 0.7])
def test_signals_while_ranks_start(tmp_path, target, number, delay):
    """Interpreters that are only importing have no handlers yet."""
    with Launched(tmp_path, "heeds_nothing") as launched:
        launcher = psutil.Process(launched.process.pid)
        wait_until(lambda: len(launcher.children()) >= 2, "no rank starts")
        time.sleep(delay)
        launched.send(number, target)
        assert launched.ended() == (CODES[number], "")


def test_a_stopped_rank_ends_with_its_launcher(greenhouse, tmp_path):
    with Launched(tmp_path, "heeds_nothing", greenhouse=greenhouse) as launched:
        _, above = launched.pids()
        os.kill(above, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(above).status() == psutil.STATUS_STOPPED, "a rank does not stop")
        launched.process.kill()
        launched.ended()


def test_ranks_started_by_a_thread_outlive_it_but_not_the_launcher():
    """Linux would end them with the thread."""
    started = []
    thread = threading.Thread(target=lambda: started.append(unlatch.Ranks(1)))
    thread.start()
    thread.join()
    with started[0] as ranks:
        assert ranks.run(os.getppid) == [os.getpid()]
