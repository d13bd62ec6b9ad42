"""Tables of measured numbers in the documentation are those of the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs_scripts import docs_script
from unlatch import methods
from unlatch.config.study import load_study

ROOT = Path(__file__).parents[1]

tables = docs_script("write_tables")
MARKED = [page for page in tables.PAGES if tables.MARKED.search(page.read_text(encoding="utf-8"))]


def _tables_of(page: str) -> set[str]:
    return {found[1] for found in tables.MARKED.finditer((ROOT / page).read_text(encoding="utf-8"))}


def test_the_readme_has_the_headlines_and_the_page_of_results_has_all() -> None:
    headlines = {"demo", "methods", "speed", "accuracy-digits", "memory-petra"}
    assert headlines <= _tables_of("README.md")
    all_of = {"speed", "study-digits-methods", "study-digits-layerpipe", "memory-petra", "memory", "prediction"}
    assert all_of <= _tables_of("docs/results.md")


def test_the_table_of_methods_has_them_all_and_invents_nothing(tmp_path: Path) -> None:
    assert sorted(name for name, *_ in tables.METHOD_ROWS) == sorted(methods.names())
    results, studies = tmp_path / "benchmarks" / "results", tmp_path / "studies"
    results.mkdir(parents=True)
    (studies / "results").mkdir(parents=True)
    unmeasured = tables.made("methods", results).splitlines()[2:]
    assert all(line.endswith(" |  |  |  |") for line in unmeasured)
    cases = '[[case]]\nlabel = "bp"\n[[case]]\nlabel = "fdg, K=2"\nmethod.name = "fdg"\nrun.stages = 2\n'
    study, lines = studies / "digits-methods.toml", studies / "results" / "digits-methods.jsonl"
    study.write_text(f'[study]\nseeds = 3\n[model]\nname = "mlp"\n{cases}')
    for seeds in (2, 3):
        done = [run for run in load_study(study).runs() if run.seed < seeds]
        found = [(run.digest, 0.9 if run.label == "bp" else 0.905) for run in done]
        told = [{"digest": name, "status": "finished", "evaluation": _evaluation(value)} for name, value in found]
        lines.write_text("".join(json.dumps(line) + "\n" for line in told))
        assert ("| +0.5 |" in tables.made("methods", results)) == (seeds == 3)
    lines.unlink()
    (results / "pipeline_speed.json").write_text(json.dumps({"ratio": {"unlatch fdg": {"median": 1.5}}}))
    measured = [line for line in tables.made("methods", results).splitlines()[2:] if line not in unmeasured]
    assert [line.split("|")[1:8:5] for line in measured] == [[" [`fdg`](docs/methods/fdg-adl.md) ", " 1.50 "]]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in MARKED])
def test_tables_agree_with_the_result_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.rewritten(text) == text, "run `python docs/write_tables.py`"


def _typed(text: str) -> list[str]:
    """Rows of tables outside of markers and of code that have two cells or more with nothing but a decimal number."""
    outside = re.sub(r"^ *```.*?^ *```", "", tables.MARKED.sub("", text), flags=re.S | re.M)
    number = r"[-+]?\d+\.\d+ ?(%|s|ms|[kMG]?B)?( ?[\[(].*[\])])?"
    rows = [line for line in outside.splitlines() if line.lstrip().startswith("|")]
    return [row for row in rows if sum(bool(re.fullmatch(number, cell.strip())) for cell in row.split("|")) >= 2]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in tables.PAGES])
def test_no_table_of_numbers_is_typed_by_hand(page: Path) -> None:
    """What was measured is written from its file; settings and formulas have words or whole numbers beside them."""
    assert _typed(page.read_text(encoding="utf-8")) == []


def test_a_typed_table_is_found() -> None:
    rows = "| method | a | b |\n|---|---|---|\n| dtr | 1.27 [0.96, 1.87] | 0.5 |\n| theory | 2 | 3.5 |\n"
    assert _typed(rows) == ["| dtr | 1.27 [0.96, 1.87] | 0.5 |"]
    assert _typed(f"<!-- table: speed -->\n{rows}<!-- end of table -->\n") == []


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in tables.PAGES])
def test_every_marker_has_its_end(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->") == len(tables.MARKED.findall(text))


def test_a_number_that_was_changed_by_hand_is_found() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks" / "results" / "pipeline_speed.json").read_text(encoding="utf-8"))
    best = max(ratio["median"] for ratio in found["ratio"].values())
    changed = text.replace(f" {best:.2f} |", f" {best + 1:.2f} |", 1)
    assert changed != text
    assert tables.rewritten(changed) == text


def test_a_result_that_changed_is_found(tmp_path: Path) -> None:
    name = {"ratio": {"fdg": {"median": 1.5, "min": 1.25, "max": 1.75, "repeats": 3}}, "command": "x"}
    (tmp_path / "pipeline_speed.json").write_text(json.dumps(name))
    page = "<!-- table: speed -->\nold\n<!-- end of table -->\n"
    assert "| fdg | 1.50 | 1.25 to 1.75 | 3 |" in tables.rewritten(page, tmp_path)


def test_accuracies_are_paired_over_equal_seeds() -> None:
    runs = [{"m": m, "seed": s, "accuracy": a, "loss": 0.1} for m, s, a in PAIRED_RUNS]
    text = tables.pairs(lambda run: run["m"], lambda _: "bp", runs)
    # Differences -1, -1, -4 at seeds 0 to 2: mean -2, error 1; seed 3 of dtr has no bp beside it.
    assert "| dtr | 90.00 % | 86.00 to 94.00 | -2.00 | -6.30 to +2.30 | 3 |" in text
    assert "few" not in text
    assert "| bp = twin | 92.00 % | 90.00 to 95.00 |  |  | 3 |" in text


PAIRED_RUNS = [
    *(("bp", seed, value) for seed, value in enumerate((91.0, 95.0, 90.0))),
    *(("twin", seed, value) for seed, value in enumerate((91.0, 95.0, 90.0))),
    *(("dtr", seed, value) for seed, value in enumerate((90.0, 94.0, 86.0, 0.0))),
    *(("few", seed, 99.0) for seed in range(2)),
]


def _evaluation(accuracy: float) -> dict[str, float]:
    return {"accuracy": accuracy, "samples": 1000.0}


def test_a_study_is_a_table_of_its_results_only(tmp_path: Path) -> None:
    cases = '[[case]]\nlabel = "bp"\n[[case]]\nlabel = "slow"\noptimizer.lr = 0.01\n'
    cases += '[[case]]\nlabel = "rare"\nrun.epochs = 2\n'
    (tmp_path / "a.toml").write_text(f'[study]\nseeds = 3\n[model]\nname = "mlp"\n{cases}')
    assert "Not measured yet: `unlatch compare studies/a.toml`" in tables.study("a", tmp_path)
    lines = [
        {"digest": run.digest, "status": "finished", "evaluation": _evaluation(0.9 - 0.01 * (run.label == "slow"))}
        for run in load_study(tmp_path / "a.toml").runs()
        if run.label != "rare" or run.seed < 2
    ]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = tables.study("a", tmp_path)
    # All seeds 10 of 1,000 samples below: an interval as if one of them were one sample off.
    assert "| slow | 89.00 % | -1.00 | -1.14 to -0.86 | 3 |" in found
    assert "1 of 1 differences; as one of 1 different computations (Holm): 1." in found
    assert "1 cases are left out" in found
    assert "rare" not in found


def test_what_was_not_measured_says_so_and_unknown_tables_are_refused(tmp_path: Path) -> None:
    assert "Not measured yet" in tables.made("speed", tmp_path)
    with pytest.raises(SystemExit, match="no table 'sped'"):
        tables.made("sped")


def test_expectations_say_where_they_come_from(tmp_path: Path) -> None:
    """What is called measured is read from a result file, and says so where there is none."""
    told = [text for case in tables.CASES for text in case.expect]
    assert [text for text in told if not text.startswith(("measured: ", "simulated: ", "by theory: "))] == []
    assert [text for text in told if text.startswith("measured") and "{" not in text] == []
    named = {name for case in tables.CASES for name in re.findall(r"`([\w-]+)`", case.method)}
    assert named <= set(methods.names())
    assert tables.made("decisions", tmp_path).count("not measured yet") == sum("{" in text for text in told)
