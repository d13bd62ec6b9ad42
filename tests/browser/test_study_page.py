"""The page of a study in a browser."""

from __future__ import annotations

import pytest

from browsing import open_file, overflow, phone
from unlatch.config.study import load_study
from unlatch.report.study import study_report
from unlatch.report.study_page import write_study

NASTY = "</script><b>late</b> & 'x'"
STUDY = f"""
[study]
seeds = 3
question = "Is <b>it</b> so?"
[model]
name = "mlp"
[[case]]
label = "bp"
[[case]]
label = "{NASTY}"
optimizer.lr = 0.2
[[case]]
label = "hot"
optimizer.lr = 0.3
"""


@pytest.fixture
def study_page(tmp_path):
    (tmp_path / "a.toml").write_text(STUDY)
    study = load_study(tmp_path / "a.toml")
    stage = {"staleness": 1.0, "predicted_staleness": 1.0, "peak_bytes": 1000, "weight_copies": 0}
    lines = [
        {
            "digest": run.digest,
            "status": "diverged" if run.label == "hot" else "finished",
            "reason": "the loss is nan" if run.label == "hot" else None,
            "evaluation": {"accuracy": 0.9 + 0.01 * run.seed - 0.05 * (run.label != "bp"), "samples": 1000.0},
            "curve": [{"epoch": n, "train_loss": 2.0 / n, "accuracy": 0.2 * n} for n in (1, 2, 3)],
            "stages": [stage, stage],
            "samples_per_second": 1000.0,
            "jobs": 1,
            "others_busy": 0.0,
        }
        for run in study.runs()
    ]
    return write_study(study_report(study, lines, "bp", "unlatch compare a.toml"), tmp_path / "a")


def test_a_study(page, study_page):
    open_file(page, study_page)
    assert page.locator("b").count() == 0
    assert "Is <b>it</b> so?" in page.locator("body").inner_text()
    rows = page.locator("#table tbody tr:not(.note)").all_inner_texts()
    assert len(rows) == 3
    assert NASTY in rows[1]
    assert "-5.00" in rows[1]
    assert "below baseline" in rows[1]
    assert "no result: 3 diverged" in rows[2]
    assert page.locator("#curves-body h3").all_inner_texts() == ["training loss", "test accuracy"]
    assert "the loss is nan" in page.locator("#table tr.note").all_inner_texts()[-1]
    phone(page)
    assert overflow(page) <= 0
