"""Tables of measured numbers in the documentation are those of the result files."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from docs_scripts import docs_script
from unlatch import methods
from unlatch.config.study import load_study
from unlatch.io.results import read_results
from unlatch.report.paired import paired

ROOT = Path(__file__).parents[1]

tables = docs_script("write_tables")
accuracy_tables, decision_table, method_table, speed_tables, study_tables = (
    docs_script(f"result_tables.{name}") for name in ("accuracy", "decisions", "methods", "speeds", "studies")
)
papers = docs_script("paper_claims")
claims, rules = docs_script("paper_claims.claims"), docs_script("paper_claims.rules")
MARKED = [page for page in tables.PAGES if tables.MARKED.search(page.read_text(encoding="utf-8"))]


def _tables_of(page: str) -> set[str]:
    return {found[1] for found in tables.MARKED.finditer((ROOT / page).read_text(encoding="utf-8"))}


def test_the_readme_has_the_headlines_and_the_page_of_results_has_all() -> None:
    headlines = {"demo", "methods", "speed", "accuracy-digits", "memory-petra"}
    assert headlines <= _tables_of("README.md")
    all_of = {"speed", "study-digits-methods", "study-digits-layerpipe", "memory-petra", "memory", "prediction"}
    assert all_of <= _tables_of("docs/results.md")


def test_the_table_of_methods_has_them_all_and_invents_nothing(tmp_path: Path) -> None:
    assert sorted(name for name, *_ in method_table.METHOD_ROWS) == sorted(methods.names())
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


def test_a_result_without_its_command_says_so(tmp_path: Path) -> None:
    """The script's name stood there as if it had been called without options."""
    found: dict[str, object] = {"ratio": {"fdg": {"median": 1.5, "min": 1.25, "max": 1.75, "repeats": 3}}}
    (tmp_path / "pipeline_speed.json").write_text(json.dumps(found))
    assert tables.made("speed", tmp_path).endswith("From `benchmarks/pipeline_speed.py`; no command is recorded.")
    (tmp_path / "pipeline_speed.json").write_text(json.dumps(found | {"settings": {"steps": 5, "only": ["a", "b"]}}))
    assert tables.made("speed", tmp_path).endswith("no command is recorded, but its settings: steps 5, only a b.")


def test_accuracies_are_paired_over_equal_seeds() -> None:
    runs = [{"m": m, "seed": s, "accuracy": a, "loss": 0.1} for m, s, a in PAIRED_RUNS]
    text = accuracy_tables.pairs(lambda run: run["m"], lambda _: "bp", runs)
    # Differences -1, -1, -4 at seeds 0 to 2: mean -2, error 1; seed 3 of dtr has no bp beside it.
    assert "| dtr | 90.00 % | 86.00 to 94.00 | -2.00 | -6.30 to +2.30 | 3 |" in text
    assert "few" not in text
    assert "| bp = twin | 92.00 % | 90.00 to 95.00 |  |  | 3 |" in text


def test_time_to_an_accuracy_counts_from_three_seeds_and_says_never() -> None:
    one = {"median": 20.0, "min": 19.0, "max": 21.0, "repeats": 3}
    common = {"target": 50.0, "speed": one, "accuracy": one, "mean_accuracy": 52.0, "seeds": 3, "reached": 3}
    slow = {"median": 0.5, "min": 0.4, "max": 0.6, "repeats": 3}
    rows = [
        {"system": "a", "seconds_to_target": one, "sooner": slow, **common},
        {"system": "b", "seconds_to_target": None, "sooner": None, **common, "reached": 0},
        {"system": "few", "seconds_to_target": one, "sooner": slow, **common, "seeds": 2},
        {"system": "unable", "reason": "it cannot", "seeds": 3},
    ]
    text = speed_tables.wall_clock({"rows": rows, "noise": {"slowest_over_fastest": 1.25}})
    assert "| a | 20.00 | 52.00 % (19.00 to 21.00) | 50.00 % | 20.0 s | 0.50 (0.40 to 0.60) | 3 of 3 |" in text
    assert "| never | - | 0 of 3 |" in text
    assert "up to 1.25 times" in text
    assert "few" not in text
    assert "unable" not in text


def test_networks_on_which_the_split_was_not_tried_say_so(tmp_path: Path) -> None:
    ratio = {"median": 1.2, "min": 1.1, "max": 1.3, "repeats": 5}
    (tmp_path / "layerpipe_speed_conv5.json").write_text(json.dumps({"speedup": ratio, "theory": 1.4, "command": "x"}))
    text = tables.made("split-pays", tmp_path)
    assert "no batch norm | 1.20 | 1.10 to 1.30 | 5 | 1.40 |" in text
    assert text.count("not measured yet") == 2


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
    assert "Not measured yet: `unlatch compare studies/a.toml`" in study_tables.study("a", tmp_path)
    lines = [
        {"digest": run.digest, "status": "finished", "evaluation": _evaluation(0.9 - 0.01 * (run.label == "slow"))}
        for run in load_study(tmp_path / "a.toml").runs()
        if run.label != "rare" or run.seed < 2
    ]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = study_tables.study("a", tmp_path)
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
    told = [text for case in decision_table.CASES for text in case.expect]
    assert [text for text in told if not text.startswith(("measured: ", "simulated: ", "by theory: "))] == []
    assert [text for text in told if text.startswith("measured") and "{" not in text] == []
    named = {name for case in decision_table.CASES for name in re.findall(r"`([\w-]+)`", case.method)}
    assert named <= set(methods.names())
    assert tables.made("decisions", tmp_path).count("not measured yet") == sum("{" in text for text in told)


def test_the_page_of_the_papers_has_them_all() -> None:
    assert {f"paper-{name}" for name in ("verdicts", *papers.PAPERS)} == _tables_of("docs/papers.md")
    for name, *counts in papers.summary(tables.RESULTS):
        assert sum(map(int, counts)) == len(papers.PAPERS[name])
    shown = " ".join(claim.where for claim in papers.PAPERS["dtr"])
    numbered = {f"Figure {n}" for n in range(3, 9)} | {f"Table {n}" for n in range(1, 9)}
    assert {name for name in numbered if name not in shown} == set()


def test_verdicts_follow_their_rules() -> None:
    tried = doctest.testmod(rules)
    assert tried.failed == 0 < tried.attempted


@pytest.mark.parametrize("name", papers.PAPERS)
def test_what_no_file_says_is_not_judged(name: str, tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    by_library = {"weight_delay", "kept_inputs", "delay_law"}
    for claim, (*_, ours, verdict, _why) in zip(papers.PAPERS[name], papers.paper(name, results), strict=True):
        if by_library.isdisjoint(getattr(source, "__name__", "") for source in claim.sources):
            assert verdict in ("**not measured yet**", "**not comparable**"), ours
            assert "not measured yet: `" in ours or "cannot be had" in ours


def test_another_result_is_another_verdict(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    found = json.loads((ROOT / "benchmarks" / "results" / "petra_buffers.json").read_text(encoding="utf-8"))

    def verdict() -> str:
        (results / "petra_buffers.json").write_text(json.dumps(found))
        said: str = {row[0]: row[4] for row in papers.paper("petra", results)}["Table 3"]
        return said

    assert verdict() == "**held**"
    next(row for row in found["rows"] if "published" in row)["bytes"] *= 1.2
    assert verdict() == "**partly: 3 of 4**"


def test_a_study_that_is_half_done_tells_what_is_missing(tmp_path: Path) -> None:
    results, studies = tmp_path / "benchmarks" / "results", tmp_path / "studies"
    (studies / "results").mkdir(parents=True)
    cases = '[[case]]\nlabel = "bp"\n[[case]]\nlabel = "{method.name}, K=2"\nmethod.name = ["dtr", "dtrp"]\n'
    cases += "run.stages = 2\n"
    study = studies / "cifar-full.toml"
    study.write_text(f'[study]\nseeds = 3\nbaseline = "bp"\n[model]\nname = "mlp"\n{cases}')
    scores = {"bp": (0.9, 0.91, 0.92), "dtrp, K=2": (0.88, 0.892, 0.901)}
    lines = [
        {"digest": run.digest, "status": "finished", "evaluation": {"accuracy": scores[run.label][run.seed]}}
        for run in load_study(study).runs()
        if run.label in scores
    ]
    (studies / "results" / "cifar-full.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, _, _, ours, verdict, _ = next(row for row in papers.paper("dtr", results) if row[0] == "Figure 8, Table 3")
    # Differences -2.0, -1.8 and -1.9: mean -1.9, Student's interval of 3 seeds reaches 0.25 to either side.
    assert "CIFAR-10, 3 epochs, dtrp, K=2: -1.90 (-2.15 to -1.65)" in ours
    command = "unlatch compare studies/cifar-full.toml --data-dir DIR"
    assert f"CIFAR-10, 3 epochs, not measured yet: fdg, K=2; dtr, K=2 (`{command}`)" in ours
    assert verdict == "**not held**"


def test_verdicts_on_papers_know_divergence_and_the_least_difference_that_accuracies_show(tmp_path: Path) -> None:
    results, studies = tmp_path / "benchmarks" / "results", tmp_path / "studies"
    (studies / "results").mkdir(parents=True)
    cases = '[[case]]\nlabel = "bp"\n[[case]]\nlabel = "the same"\n'
    cases += '[[case]]\nlabel = "{method.name}, K=2"\nmethod.name = ["dtr", "dtrp"]\nrun.stages = 2\n'
    study = studies / "cifar-full.toml"
    study.write_text(f'[study]\nseeds = 3\nbaseline = "bp"\n[model]\nname = "mlp"\n{cases}')
    # One sample of 100 less on all seeds, in numbers that are not the same to the last bit.
    scores = {"bp": (0.9, 0.91, 0.92), "the same": (0.9, 0.91, 0.92), "dtrp, K=2": (0.89, 0.90, 0.91)}
    lines = [
        {"digest": run.digest, "status": "finished" if run.label in scores else "diverged"}
        | {"evaluation": {"accuracy": scores.get(run.label, (0.1,) * 3)[run.seed], "samples": 100}}
        for run in load_study(study).runs()
    ]
    (studies / "results" / "cifar-full.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours = next(row[3] for row in papers.paper("dtr", results) if row[0] == "Figure 8, Table 3")
    assert "CIFAR-10, 3 epochs, dtr, K=2: diverged *(not held)*" in ours
    # 4.303 standard errors of a third of a sample.
    assert "CIFAR-10, 3 epochs, dtrp, K=2: -1.00 (-2.43 to +0.43) *(undecided)*" in ours


def test_pictures_of_the_papers_are_those_of_the_result_files() -> None:
    figures = docs_script("make_paper_figures")
    for name in figures.PICTURES:
        drawn = (ROOT / "docs" / "img" / "papers" / f"{name}.svg").read_text(encoding="utf-8")
        assert figures.drawn(name) == drawn, "run `python docs/make_paper_figures.py`"


def test_summaries_of_benchmarks_compare_equal_seeds() -> None:
    """Three more seeds of one setting had no run of bp beside them, and counted."""
    results = ROOT / "benchmarks" / "results"
    accuracy: dict[str, dict[int, float]] = {}
    for run in read_results(results / "auxnet_accuracy.jsonl"):
        accuracy.setdefault(run["setting"], {})[run["seed"]] = run["accuracy"]
    for row in json.loads((results / "auxnet_accuracy.json").read_text(encoding="utf-8"))["rows"]:
        both = paired(accuracy[row["setting"]], accuracy["bp"])
        assert both is not None
        assert (row["seeds"], row["difference"]) == (both.seeds, pytest.approx(both.mean)), row


def _told(folder: Path, name: str, worth: Callable[[str, int], float]) -> str:
    """The answer of one of the project's studies, had its runs these accuracies."""
    text = (ROOT / "studies" / f"{name}.toml").read_text(encoding="utf-8")
    (folder / "results").mkdir(exist_ok=True)
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    lines = [
        {
            "digest": run.digest,
            "status": "finished",
            "evaluation": {"accuracy": worth(run.label, run.seed), "samples": 1000.0},
        }
        for run in load_study(folder / f"{name}.toml").runs()
    ]
    (folder / "results" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return study_tables.answer(name, folder)


def test_the_answer_of_a_study_says_where_a_method_starts_to_lose(tmp_path: Path) -> None:
    def worth(label: str, seed: int) -> float:
        lost = 0.1 if label.startswith("fdg, K=6, M=1") or label.startswith("fdg, K=8, M=1") else 0.0
        return 0.9 + 0.001 * seed - lost * (1 + 0.01 * seed)

    told = _told(tmp_path, "digits-stages", worth)
    assert "| fdg | 1 | +0.00 | +0.00 | -10.10 * | -10.10 * | K=6 |" in told
    assert "| fdg | 4 | +0.00 | +0.00 | +0.00 | +0.00 | not up to K=8 |" in told
    assert "With 1 micro-batch, of 11 methods begin to lose: 1 at K=6." in told


@pytest.mark.parametrize(("at_16", "said"), [(0.2, "a larger k does not narrow it"), (0.0, "is not shown at k=16")])
def test_the_answer_of_a_study_says_what_inversion_costs(tmp_path: Path, at_16: float, said: str) -> None:
    def worth(label: str, seed: int) -> float:
        lost = {"k=1": 0.1, "k=16": at_16}.get(label.split(", ")[-1], 0.0) if "reverse" in label else 0.0
        return 0.9 - lost * (1 + 0.01 * seed)

    told = _told(tmp_path, "digits-petra", worth)
    assert (
        "k=1: -10.10 points (-10.35 to -9.85): below; k=4: +0.00 points (-0.14 to +0.14): no difference shown" in told
    )
    assert said in told


def test_the_answer_of_a_study_says_which_defaults_hold(tmp_path: Path) -> None:
    lost = {"pipedream, K=2": 0.02, "dtr, K=2": 0.001, "pipedream, K=4": 0.011, "dtr, K=4": 0.009}

    def worth(label: str, seed: int) -> float:
        return 0.7 + 0.01 * seed - lost.get(label, 0.0) * (1 + 0.1 * seed)

    held, missed = {}, {}
    for row in _told(tmp_path, "cifar-full", worth).splitlines()[2:4]:
        _, stages, _, held[stages], missed[stages], *_ = (cell.strip() for cell in row.split("|"))
    assert missed == {"2": "pipedream (-2.20 *)", "4": "pipedream (-1.21 *)"}
    assert "dtr (-0.99 *); dtrp (+0.00); fdg (+0.00)" in held["4"]
    assert held["2"].startswith("dtr (-0.11); dtrp (+0.00)")


def test_an_answer_says_that_nothing_was_measured_and_knows_its_studies(tmp_path: Path) -> None:
    (tmp_path / "digits-stages.toml").write_text((ROOT / "studies" / "digits-stages.toml").read_text(encoding="utf-8"))
    told = study_tables.answer("digits-stages", tmp_path)
    assert told == "*Not measured yet: `unlatch compare studies/digits-stages.toml`.*"
    with pytest.raises(SystemExit, match="no answer of the study 'digits-dtrp'; known: digits-stages, "):
        study_tables.answer("digits-dtrp")


def test_cases_that_the_papers_name_are_in_their_studies() -> None:
    """A label that no study has would stay "not measured yet" for ever."""
    for claim in (claim for paper in papers.PAPERS.values() for claim in paper):
        for source in claim.sources:
            if getattr(source, "func", None) not in (claims.beside_baseline, claims.against):
                continue
            name, _, labels, *_ = source.args
            file = ROOT / "studies" / f"{name}.toml"
            if file.is_file():
                others = labels.values() if isinstance(labels, dict) else ()
                assert {*labels, *others} <= {case.label for case in load_study(file).cases}, claim.where
