"""What is expected of a study is written down before it is run, and judged by ranks afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from docs_scripts import docs_script
from unlatch.advise.advice import ELSEWHERE
from unlatch.config.study import load_study
from unlatch.report.foretold import Judged, correlations, judged, kendall, read_foretold, spearman
from unlatch.report.study import study_report

CASES = """
[[case]]
label = "sgd, bp"
[[case]]
label = "sgd, {method.name}"
method.name = ["dtr", "dsp"]
method.microbatches = 1
run.stages = 2
run.split = [["layers.1"]]
[[case]]
label = "rms, dtr"
method.name = "dtr"
method.microbatches = 1
optimizer.name = "RMSprop"
run.stages = 2
run.split = [["layers.1"]]
"""


def test_predictions_are_those_of_the_advice_and_never_come_after_a_run(study, compare):
    path = study(CASES, "seeds = 3")
    result = compare(path, "--predict")
    assert result.exit_code == 0, result.output
    told = json.loads(Path("results/small.predicted.json").read_text())
    assert [(row["case"], row["updates_late"], row["rank"], row["rank_of_all"]) for row in told["cases"]] == [
        ("sgd, dtr", 1.0, 1.0, 1.0),
        ("sgd, dsp", 2.0, 2.0, 2.0),
        ("rms, dtr", 1.0, None, None),
    ]
    assert "RMSprop" in told["cases"][-1]["unknown"]
    assert told["made_at"] <= "9999"
    assert not Path("results/small.jsonl").exists()
    assert compare(path, "--only", "sgd, bp").exit_code == 0
    late = compare(path, "--predict")
    assert late.exit_code != 0
    assert "3 runs of small are done" in " ".join(late.output.split())
    assert json.loads(Path("results/small.predicted.json").read_text()) == told


@pytest.mark.parametrize("seed", range(3))
def test_rank_correlations_are_those_of_scipy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    a, b = generator.integers(0, 6, 20).astype(float), generator.integers(0, 8, 20).astype(float)
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert kendall(a, b) == pytest.approx(kendalltau(a, b).statistic)


def _case(optimizer: str, margin: float | None, late: float, worse: float) -> Judged:
    return Judged({"optimizer": optimizer, "margin": margin, "updates_late": late}, worse)


def test_a_ranking_that_holds_has_correlation_one_and_divergence_is_the_worst() -> None:
    cases = [_case("a", *row) for row in ((8, 3, 0), (7, 1, 1), (6, 2, 2), (5, 0, math.inf))]
    cases += [_case("b", None, late, worse) for late, worse in ((1, 0.1), (2, 0.2), (4, 0.3))]
    found = {(one.group, one.ranking): one for one in correlations(cases)}
    assert found["a", "advisor"].spearman == found["a", "advisor"].kendall == 1.0
    assert found["a", "delay alone"].spearman < 0.0
    assert found["a", "advisor"].chance == pytest.approx(1 / math.factorial(4), abs=0.02)
    # There is nothing to judge where the advisor is silent, but delay alone has its say.
    assert ("b", "advisor") not in found
    assert found["b", "delay alone"].spearman == 1.0
    # Rankings are compared on the same cases.
    assert found["all", "advisor"].cases == found["all", "delay alone"].cases == 4


def test_what_is_not_told_apart_has_no_correlation() -> None:
    alike = [_case("a", 1.0, late, late / 10) for late in (1, 2, 3)]
    assert [one.ranking for one in correlations(alike) if one.group == "a"] == ["delay alone"]
    assert correlations([_case("a", n, n, 0.0) for n in range(4)]) == []


def _written(folder: Path, accuracy: dict[str, list[float]], diverged: str = "") -> Path:
    """A study with a file of predictions and results."""
    (folder / "results").mkdir()
    cases = '[[case]]\nlabel = "x, bp"\n'
    cases += "".join(f'[[case]]\nlabel = "x, {n}"\noptimizer.lr = {0.01 * n}\n' for n in range(1, len(accuracy)))
    path = folder / "a.toml"
    path.write_text(f'[study]\nseeds = 3\n[model]\nname = "mlp"\n{cases}')
    asked = load_study(path)
    lines = [
        {"digest": run.digest, "status": "diverged" if run.label == diverged else "finished"}
        | {"evaluation": {"accuracy": accuracy[run.label][run.seed], "samples": 1000.0}}
        for run in asked.runs()
    ]
    (folder / "results" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {"case": case.label, "digest": asked.run_of(case, 0).digest, "optimizer": "x", "margin": 5.0 - n}
        | {"updates_late": float(n), "verdict": "about bp" if n < 3 else "large loss"}
        for n, case in enumerate(asked.cases[1:], start=1)
    ]
    told = {"made_at": "2026-01-02T00:00:00Z", "commit": "0123456789abc", "cases": rows}
    (folder / "results" / "a.predicted.json").write_text(json.dumps(told))
    return path


def _said(*shares: float) -> list[Judged]:
    return [Judged({"verdict": "about bp"}, -share) for share in shares]


def test_tables_of_what_was_foretold(tmp_path: Path) -> None:
    tables = docs_script("result_tables.studies")
    found = {"x, bp": [0.9] * 3, "x, 1": [0.9, 0.89, 0.88], "x, 2": [0.8] * 3, "x, 3": [0.8, 0.7, 0.75]}
    _written(tmp_path, found)
    text = tables.foretold("a", tmp_path)
    assert "| x | advisor | 3 | +1.00 " in text
    # 1 point is about bp, 10 are not; 15 are a large loss.
    assert "(within 2 points in short runs) | 2 | 1 | -5.5 | -10.0 to -1.0 |" in text
    assert "(6 points or more in short runs) | 1 | 1 | -15.0 | -15.0 to -15.0 |" in text
    assert "on 2026-01-02 at commit `012345678`" in text
    assert "| 2 | -0.100 * |" in tables.grid("a", tmp_path)
    assert "| 3 | -0.150 * |" in tables.grid("a", tmp_path)
    assert "| diverged to -1.0 |" in tables._verdicts([*_said(-0.01, -math.inf)])
    (tmp_path / "results" / "a.jsonl").unlink()
    assert "Not measured yet" in tables.foretold("a", tmp_path)
    assert "3 cases, about 0 of which" in tables.foretold("a", tmp_path)


def test_what_is_printed_of_verdicts_is_what_a_study_found(tmp_path: Path) -> None:
    tables = docs_script("result_tables.studies")
    found = {"x, bp": [0.9] * 3, "x, 1": [0.8, 0.7, 0.75], "x, 2": [0.8] * 3, "x, 3": [0.9] * 3}
    _written(tmp_path, found)
    assert f"*{ELSEWHERE}*; in this study 0 of 2 held." in tables.printed("a", tmp_path)
    (tmp_path / "results" / "a.jsonl").unlink()
    with pytest.raises(SystemExit, match="0 of 0 cases held"):
        tables.printed("a", tmp_path)


def test_a_sentence_that_a_study_contradicts_is_refused(tmp_path: Path) -> None:
    _written(tmp_path, {"x, bp": [0.9] * 3, "x, 1": [0.9, 0.89, 0.88], "x, 2": [0.8] * 3, "x, 3": [0.9] * 3})
    with pytest.raises(SystemExit, match="1 of 2 cases held, which is just half"):
        docs_script("result_tables.studies").printed("a", tmp_path)


def test_a_case_that_was_changed_since_is_not_judged_and_one_that_diverged_is(tmp_path: Path) -> None:
    found = {f"x, {n}": [0.9] * 3 for n in ("bp", 1, 2, 3)}
    path = _written(tmp_path, found, diverged="x, 2")
    told = read_foretold(tmp_path / "results" / "a.predicted.json")
    assert told is not None
    told["cases"][0]["digest"] = "another"
    lines = [json.loads(line) for line in (tmp_path / "results" / "a.jsonl").read_text().splitlines()]
    cases = judged(study_report(load_study(path), lines, "x, bp", ""), told)
    assert [(case.foretold["case"], case.worse) for case in cases] == [("x, 2", math.inf), ("x, 3", 0.0)]
    assert "| 2 | diverged |" in docs_script("result_tables.studies").grid("a", tmp_path)


def test_beside_a_baseline_that_diverged_nothing_is_judged(tmp_path: Path) -> None:
    path = _written(tmp_path, {f"x, {n}": [0.9] * 3 for n in ("bp", 1, 2, 3)}, diverged="x, 2")
    told = read_foretold(tmp_path / "results" / "a.predicted.json")
    assert told is not None
    lines = [json.loads(line) for line in (tmp_path / "results" / "a.jsonl").read_text().splitlines()]
    lines[0]["status"] = "diverged"
    assert judged(study_report(load_study(path), lines, "x, bp", ""), told) == []
