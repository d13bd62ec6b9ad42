"""Signals: what a process makes of them, and what reaches ranks through their launcher."""

from __future__ import annotations

import pickle
import signal
import threading

import pytest

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
