"""Study files: what they span, what tells runs apart, and how wrong ones are refused."""

from __future__ import annotations

import pytest

from unlatch.cli.settings import JUDGES
from unlatch.config.study import load_study
from unlatch.errors import ConfigError

CUT = 'run.split = [["layers.1"]]'


def test_lists_in_a_case_span_a_grid(study):
    found = load_study(
        study(
            """
            [[case]]
            label = "bp"
            [[case]]
            label = "{method.name} K={run.stages} M={method.microbatches}"
            method.name = ["dtr", "fdg"]
            method.microbatches = [1, 4]
            run.stages = 2
            """
        )
    )
    assert [case.label for case in found.cases] == [
        "bp",
        *("dtr K=2 M=1", "dtr K=2 M=4", "fdg K=2 M=1", "fdg K=2 M=4"),
    ]
    last = found.cases[-1].config
    assert (last.method.name, last.method.options, last.run.stages, last.run.epochs) == (
        "fdg",
        {"microbatches": 4},
        2,
        2,
    )
    assert [(run.seed, run.label) for run in found.runs()][:6] == [
        *((0, case.label) for case in found.cases),
        (1, "bp"),
    ]


def test_a_label_without_names_of_settings_says_what_spans(study):
    found = load_study(study('[[case]]\nlabel = "late"\nmethod.name = "dtr"\noptimizer.lr = [0.1, 0.2]'))
    assert [case.label for case in found.cases] == ["late, lr=0.1", "late, lr=0.2"]


def test_a_value_that_is_a_list_has_brackets_of_its_own(study):
    case = f'[[case]]\nlabel = "two"\nrun.stages = 2\n{CUT}\noptimizer.name = "Adam"\noptimizer.betas = [[0.8, 0.9]]'
    (found,) = load_study(study(case)).cases
    assert found.config.run.split == ("layers.1",)
    assert found.config.optimizer.arguments["betas"] == (0.8, 0.9)


def test_a_case_that_names_a_method_has_none_of_the_common_options(study):
    common = '[model]\nname = "mlp"\n[method]\nname = "dtr"\nmicrobatches = 2\n'
    cases = '[[case]]\nlabel = "a"\nmethod.predict = "linear"\n[[case]]\nlabel = "b"\nmethod.name = "fdg"'
    first, second = load_study(study(cases, common=common), JUDGES).cases
    assert first.config.method.options == {"microbatches": 2, "predict": "linear"}
    assert second.config.method.options == {}


def test_the_digest_is_of_what_numbers_depend_on(study):
    def digests(head: str = "seeds = 2", case: str = '[[case]]\nlabel = "a"', **kwargs) -> list[str]:
        return [run.digest for run in load_study(study(case, head), **kwargs).runs()]

    usual = digests()
    assert len(set(usual)) == 2  # another seed is another run
    assert (
        digests(
            case='[[case]]\nlabel = "other name"\nmethod.name = "bp"\nrun.out = "x"\nrun.transport = "gloo"',
            data_dir="/elsewhere",
        )
        == usual
    )
    assert digests("seeds = [1, 0]") == usual[::-1]
    # Of runs from before stages could be compiled: a setting that is new and off must not hide their results.
    assert usual[0] == "d9bcb1e5321535fd"
    others = ("run.epochs = 3", "optimizer.lr = 0.2", "data.holdout = 128", "method.microbatches = 2")
    for case in (*others, "run.compile = true"):
        assert not set(digests(case=f'[[case]]\nlabel = "a"\n{case}')) & set(usual), case
    assert not set(digests("seeds = 2\nprobe = 2")) & set(usual)


def test_the_same_settings_are_the_same_runs(study):
    found = load_study(study('[[case]]\nlabel = "a"\n[[case]]\nlabel = "b"\nmethod.name = "bp"'))
    assert [(run.labels, run.seed) for run in found.runs()] == [(("a", "b"), 0), (("a", "b"), 1)]


A = '[[case]]\nlabel = "a"\n'


@pytest.mark.parametrize(
    ("head", "cases", "said"),
    [
        ("", A, r"study.seeds: missing"),
        ("seeds = []", A, r"study.seeds: no seeds, so nothing would be run"),
        ("seeds = 0", A, r"study.seeds: no seeds"),
        ("seeds = 2000", A, r"study.seeds: expected how many, at most 1,000, or a list of them, got 2000"),
        ("seeds = -1", A, r"study.seeds: expected how many, at most 1,000, or a list of them, got -1"),
        ("seeds = [1, 1]", A, r"study.seeds: a seed is listed twice"),
        ('seeds = "three"', A, r"study.seeds: expected how many, as in seeds = 3"),
        ("seeds = 2\nbase = 1", A, r"unknown key 'study.base'; did you mean 'study.baseline'"),
        ('seeds = 2\nbaseline = "bp"', A, r"study.baseline: there is no case 'bp'; known: a"),
        ('seeds = 2\nname = "a/b"', A, r"study.name: expected letters"),
        ("seeds = 2", "", r"nothing to compare: expected at least one \[\[case\]\]"),
        ("seeds = 2", "[[case]]\nrun.stages = 2", r"\[\[case\]\] number 1 has no label"),
        ("seeds = 2", A + "method.name = []", r"case 'a': method.name is an empty list"),
        ("seeds = 2", A + A, r"two cases are called 'a'"),
        ("seeds = 2", A + 'method.name = "dtpr"', r"case 'a':\n  method: .*dtpr.*Did you mean 'dtrp'"),
        ("seeds = 2", A + "method.microbatch = 2", r"case 'a':\n  method: .*no option 'microbatch'"),
        ("seeds = 2", A + "optimiser.lr = 1", r"case 'a':\n  unknown section 'optimiser'"),
        ("seeds = 2", A + "run.seed = 1", r"case 'a': run.seed: every run has one of study.seeds"),
        ("seeds = 2", A + 'run.stages = 2\nrun.split = ["x"]', r"run.split.*\n.*needs brackets of its own"),
        ("seeds = 2", '[[case]]\nlabel = "{method.nam}"\nmethod.name = "bp"', r"names 'method.nam'.*did you mean"),
        (
            "seeds = 2",
            A + f"optimizer.lr = {list(range(40))}\nrun.epochs = {list(range(1, 40))}",
            r"spans more than 1,000",
        ),
    ],
)
def test_refused(study, compare, head, cases, said):
    path = study(cases, head)
    with pytest.raises(ConfigError, match=said) as refused:
        load_study(path, JUDGES)
    assert "small.toml" in str(refused.value)
    result = compare(path)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_settings_file_is_no_study_and_folders_take_no_flags_of_one(compare, tmp_path):
    (tmp_path / "conf.toml").write_text('[model]\nname = "mlp"\n')
    assert "not a study: expected a section [study]" in compare("conf.toml").output
    assert "by itself" in compare("conf.toml", "run").output
    assert "are for studies" in compare("run", "--jobs", 2).output
