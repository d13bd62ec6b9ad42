"""The demo: rows with what they are measured against, sentences and closing lines that follow the numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from unlatch import demo
from unlatch.demo.entries import ENTRIES, chosen_entries
from unlatch.demo.words import closing_lines, sentence
from unlatch.report.comparison import Row

BY_LABEL = {entry.label: entry for entry in ENTRIES}


def test_a_short_demo(tmp_path, capsys):
    """Planned tasks, and a reversible network with a baseline of its own, on real processes."""
    threads = torch.get_num_threads()
    try:
        shortened = ["--seeds", "2", "--seconds", "0", "--epochs", "1", "--methods", "layerpipe,petra"]
        demo.main([*shortened, "--json", str(tmp_path / "demo.json")])
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert "no further seeds" in text
    found = json.loads((tmp_path / "demo.json").read_text())
    rows = {row["label"]: row for row in found["rows"]}
    assert list(rows) == ["bp", "layerpipe", "bp of revnet14", "petra"]
    assert [rows[label]["baseline"] for label in rows] == ["bp", "bp", "bp of revnet14", "bp of revnet14"]
    assert all(row["sentence"] and row["sentence"] in text for row in rows.values())
    assert rows["petra"]["staleness"] == rows["petra"]["predicted"] == [2, 1, 0]
    assert rows["petra"]["input_errors"][1] > 0
    assert len(rows["petra"]["process_bytes"]) == 2
    assert rows["layerpipe"]["staleness"] == pytest.approx(rows["layerpipe"]["predicted"])
    assert found["command"] == "python -m unlatch.demo --seeds 2 --epochs 1 --methods layerpipe,petra"
    assert found["versions"]["torch"] == torch.__version__
    # The last lines are one per system.
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["LayerPipe", "PETRA"]
    assert text.splitlines()[-2:] == found["closing"]
    out = tmp_path / "runs" / "demo"
    page = (out / "report.html").read_text()
    assert all(said in page for said in [*found["closing"], *(row["sentence"] for row in rows.values())])
    assert {path.name for path in (out / "figures").glob("*.png")} >= {"curves.png", "timeline.png", "costs.png"}
    plan = json.loads((out / "layerpipe-plan.json").read_text())
    assert plan["method"] == "layerpipe"
    assert re.match(r"The planner .*, which balances the processes to \d+%; ", rows["layerpipe"]["sentence"])
    assert (out / "petra-seed0" / "checkpoints" / "latest" / "model.safetensors").exists()


def test_rows_of_some_methods_come_with_what_they_are_measured_against(capsys):
    assert [entry.label for entry in chosen_entries(["auxnet"])] == ["bp", "auxnet", "auxnet shallow"]
    assert {entry.baseline for entry in ENTRIES} | {entry.beside for entry in ENTRIES if entry.beside} <= set(BY_LABEL)
    assert [entry.system for entry in ENTRIES if entry.system] == ["DTRP", "LayerPipe", "AuxNet", "PETRA"]
    with pytest.raises(SystemExit) as ended:
        demo.main(["--methods", "dtrp,magic"])
    assert ended.value.code == 2
    assert re.search(r"no row 'magic'; it has bp, zb-h1", capsys.readouterr().err)


def row(label, ratio=1.0, accuracies=(0.98, 0.99), kept=(10_000_000,), **rest) -> Row:
    measured = {"bubble": 0.05, "staleness": (0.0,), "predicted": (0.0,), "weight_copies": (0,), **rest}
    return Row(label, tuple(accuracies), 100.0, ratio, peak_bytes=tuple(kept), process_bytes=tuple(kept), **measured)


def test_closing_lines_follow_the_numbers():
    entries = chosen_entries(["pipedream", "dtrp"])
    rows = {
        "bp": row("bp"),
        "pipedream": row("pipedream", 1.8, kept=(20_000_000, 5_000_000)),
        "dtrp": row("dtrp", 1.5, (0.98, 0.98), (4_000_000, 5_000_000), staleness=(1.0, 0.0)),
    }
    (line,) = closing_lines(entries, rows)
    gained, paid = line.split(" Paid: ")
    assert "1.50 times the speed of one process" in gained
    assert "5.0 MB kept in the fuller process (10.0 MB under bp, 20.0 MB under pipedream)" in gained
    assert "gradients up to 1 update late" in paid
    assert "0.83 times the speed of pipedream" in paid
    assert "Even: -0.5 points of accuracy against bp, where seeds differ by 1.0" in paid
    slow = replace(rows["dtrp"], ratio=0.9, accuracies=(0.8, 0.8), process_bytes=(30_000_000,))
    (line,) = closing_lines(entries, {**rows, "dtrp": slow})
    gained, paid = line.split(" Paid: ")
    assert gained == "DTRP gained: nothing."
    assert "2 processes for 0.90 times the speed of one" in paid
    assert "-18.5 points of accuracy against bp." in paid


def test_what_is_left_of_a_method_is_a_rival_in_accuracy_only():
    entries = chosen_entries(["auxnet"])
    shallow = row("auxnet shallow", 2.5, (0.9, 0.9), (1,))
    (line,) = closing_lines(entries, {"bp": row("bp"), "auxnet": row("auxnet", 1.2), "auxnet shallow": shallow})
    assert "+8.5 points of accuracy against auxnet shallow" in line.split(" Paid: ")[0]
    assert "speed of auxnet shallow" not in line
    assert "no gradient is late" in line


def test_sentences_say_what_was_measured():
    late = row("pipedream", 1.8, bubble=0.031, staleness=(1.0, 0.0), weight_copies=(1, 0))
    said = sentence(BY_LABEL["pipedream"], {"pipedream": late}, {})
    assert "waiting 3%" in said
    assert "up to 1 update late, with 1 old copy of weights kept" in said
    back = row("petra", input_errors=(None, 0.25, None), kept=(4_000_000, 5_000_000))
    said = sentence(BY_LABEL["petra"], {"petra": back, "bp of revnet14": row("bp of revnet14")}, {})
    assert "up to 0.2" in said
    assert "5.0 MB where bp keeps 10.0 MB" in said
    said = sentence(
        BY_LABEL["layerpipe"], {"layerpipe": late, "pipedream": row("pipedream", 1.7)}, {"layerpipe": "as is"}
    )
    assert said.startswith("As is; 1.80 times the speed of one process, where whole stages under pipedream have 1.70")
    every = {label: row(label) for label in BY_LABEL}
    assert all(sentence(entry, every, {"layerpipe": "x"}).endswith(".") for entry in ENTRIES)
