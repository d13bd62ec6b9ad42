"""The file of results: whole lines only, one writer."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from unlatch.errors import ConfigError
from unlatch.io.results import Results, read_results

FILE = Path("found.jsonl")


def add(*rows: dict) -> None:
    with Results(FILE) as results:
        for row in rows:
            results.add(row)


@pytest.mark.parametrize("kept", range(1, 12))
def test_a_line_that_was_cut_off_is_dropped(kept):
    add({"a": 1})
    torn = json.dumps({"bb": [1, 2]})[:kept].encode()
    FILE.write_bytes(FILE.read_bytes() + torn)
    assert read_results(FILE) == [{"a": 1}]
    with Results(FILE) as results:
        assert results.rows == [{"a": 1}]
        results.add({"c": 3})
    assert read_results(FILE) == [{"a": 1}, {"c": 3}]


def test_a_line_that_lacks_only_its_end_is_kept():
    FILE.write_text('{"a": 1}\n{"b": 2}')
    add({"c": 3})
    assert read_results(FILE) == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_a_line_that_was_edited_is_named():
    FILE.write_text('{"a": 1}\noops\n{"b": 2}\n')
    with pytest.raises(ConfigError, match=r"found.jsonl, line 2: expected a JSON object"):
        Results(FILE)


def test_one_writer_at_a_time():
    with Results(FILE), pytest.raises(ConfigError, match="another process is writing results there now"):
        Results(FILE)
    add({"a": 1})


def test_numbers_that_json_lacks_become_null():
    add({"loss": math.nan, "deep": [{"most": math.inf}]})
    assert read_results(FILE) == [{"loss": None, "deep": [{"most": None}]}]


def test_a_full_disk_leaves_no_half_line(monkeypatch):
    with Results(FILE) as results:
        results.add({"a": 1})
        inner, left = results._file, [4]

        class Full:
            def write(self, data):
                if not left:
                    raise OSError(28, "No space left on device")
                return inner.write(bytes(data)[: left.pop()])

            def __getattr__(self, name):
                return getattr(inner, name)

        results._file = Full()
        with pytest.raises(OSError, match="No space"):
            results.add({"b": 2})
        assert results.rows == [{"a": 1}]
    assert FILE.read_bytes() == b'{"a": 1}\n'
    assert os.path.getsize(FILE) == 9
