"""What a study says of its cases, from lines of results written by hand: never more than they show."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from unlatch.config.study import load_study
from unlatch.io.results import Results, read_results
from unlatch.report.study import study_report


@pytest.fixture
def told(study):
    """The report on values by case and seed; a word instead of a number is the status of a run without one."""

    def make(values, head="", cases="", samples=1000):
        names = '[[case]]\nlabel = "bp"\n' + "".join(
            f'[[case]]\nlabel = "{name}"\noptimizer.lr = {0.01 + 0.001 * place}\n' for place, name in enumerate("abcd")
        )
        seeds = max(map(len, values.values()))
        asked = load_study(study(names + cases, f"seeds = {seeds}\n{head}"))
        path = Path("lines.jsonl")
        path.unlink(missing_ok=True)
        with Results(path) as results:
            for run in asked.runs():
                value = dict(enumerate(values.get(run.label, ()))).get(run.seed)
                if value is None:
                    continue
                ended = not isinstance(value, str)
                found = {"evaluation": {asked.measure: value, "samples": samples}} if ended else {"reason": "so"}
                settings = {"data": run.config.data.model_dump(mode="json", exclude_none=True)}
                status = "finished" if ended else value
                results.add({"digest": run.digest, "status": status, "settings": settings, "jobs": 2, **found})
        return study_report(asked, read_results(path), "bp", "unlatch compare small.toml")

    return make


def said(report, label):
    return next(report.verdict(case) for case in report.cases if label in case.labels)


def numbers(report, label):
    return next(row for row in report.numbers() if row["case"] == label)


def test_a_baseline_that_diverged_on_some_seeds_gives_no_verdict(told):
    report = told({"bp": [0.9, 0.91, 0.92, "diverged"], "a": [0.5, 0.51, 0.53, 0.52]})
    assert said(report, "a") == "no result: baseline has 1 diverged"
    row = numbers(report, "a")
    assert (row["is_result"], row["interval_low"], row["chance_among_all"]) == (False, None, None)


def test_seeds_that_the_baseline_has_not_come_to_yet_are_named(told):
    report = told({"bp": [0.9, 0.91, 0.92, None], "a": [0.5, 0.51, 0.53, 0.52]})
    assert said(report, "a") == "below baseline"
    assert any("a is compared on the 3 of its 4 seeds that its baseline has too" in note for note in report.notes)


def test_equal_differences_are_not_certain(told):
    one_sample = told({"bp": [0.9, 0.91, 0.92], "a": [0.899, 0.909, 0.919]})
    row = numbers(one_sample, "a")
    # As if one seed differed by one of 1000 samples: an error of 0.001 / 3, of which Student's reach is 4.303.
    assert row["interval_low"] == pytest.approx(-0.001 - 4.303 * 0.001 / 3)
    assert row["interval_high"] == pytest.approx(-0.001 + 4.303 * 0.001 / 3)
    assert said(one_sample, "a") == "below in all pairs, not beyond chance"
    assert any("differences of all seeds are the same" in note for note in one_sample.notes)
    many = told({"bp": [0.9, 0.91, 0.92], "a": [0.88, 0.89, 0.9]})
    assert said(many, "a") == "below baseline"
    assert many.markdown().count("-2.14 to -1.86") == 1


def test_equal_differences_of_a_loss_are_not_certain_either(told):
    report = told({"bp": [1.5, 2.5, 3.5], "a": [1.5 + 2**-22, 2.5 + 2**-22, 3.5 + 2**-22]}, 'measure = "loss"')
    assert said(report, "a") == "above in all pairs, not beyond chance"


@pytest.mark.parametrize("case", ["bp", "a"])
def test_a_result_that_is_no_number_is_called_so(told, case):
    values = {"bp": [0.9, 0.91, 0.92, 0.93], "a": [0.9, 0.91, 0.92, 0.93]}
    values[case][1] = math.nan
    report = told(values)
    whose = "" if case == "a" else "baseline has "
    assert said(report, "a") == f"no result: {whose}1 without a number"
    assert not numbers(report, "a")["is_result"]


def test_one_of_many_comparisons_is_judged_as_one_of_many(told):
    base = [0.90, 0.91, 0.92]
    chosen = {"a": [0.889, 0.9, 0.905], "b": [0.90, 0.912, 0.919], "c": [0.902, 0.91, 0.918]}
    alone = told({"bp": base, "a": chosen["a"]})
    # Differences of 11, 10 and 15 samples: mean 12, error 1.53, t = 7.86, chance 0.0158; of three 0.047, of four 0.063.
    assert said(alone, "a") == "below baseline"
    assert numbers(alone, "a")["chance"] == pytest.approx(0.0158, abs=1e-4)
    three = told({"bp": base, **chosen})
    assert said(three, "a") == "below baseline"
    four = told({"bp": base, **chosen, "d": [0.901, 0.909, 0.921]})
    assert said(four, "a") == "below baseline, not beyond chance as one of 4"
    assert numbers(four, "a")["chance_among_all"] == pytest.approx(4 * numbers(four, "a")["chance"])
    assert any(note.startswith("4 comparisons") for note in four.notes)


def test_numbers_of_other_samples_are_not_compared(told):
    other = '[[case]]\nlabel = "elsewhere"\ndata.holdout = 128\n'
    report = told({name: [0.9, 0.91, 0.92] for name in ("bp", "elsewhere")}, cases=other)
    assert said(report, "elsewhere") == "no result: baseline was evaluated on other samples"


def test_runs_on_ranks_are_lines_like_others(study, compare, lines):
    cases = '[[case]]\nlabel = "bp"\n'
    cases += '[[case]]\nlabel = "P={run.processes}"\nmethod.name = "dtr"\nrun.stages = 2\nrun.split = [["layers.1"]]\n'
    path = study(cases + "run.processes = [1, 2]\n", "seeds = 1\nprobe = 2")
    result = compare(path)
    assert result.exit_code == 0, result.output
    here, there = (next(row for row in lines() if row["label"] == label) for label in ("P=1", "P=2"))
    assert (there["status"], there["settings"]["run"]["processes"]) == ("finished", 2)
    assert there["evaluation"] == here["evaluation"]
    assert [stage["staleness"] for stage in there["stages"]] == [1.0, 0.0]
    assert (there["without_probe"], there["gradients"]) == ("on ranks", None)
    assert here["gradients"]
    assert "P=2 computed the same numbers, epoch by epoch, as P=1" in result.stdout
    assert "3 of 3 runs are done" in compare(path).stdout
    refused = compare(path, "--jobs", 2)
    assert refused.exit_code == 2
    assert "--jobs 2 is for runs in one process, and 'P=2' has several" in refused.output
    assert not list(Path("results").glob(".small*"))
    assert json.loads(compare(path, "--json").stdout)["cases"][2]["verdict"] == "no result: under 3 seeds"
