"""Packages of extras are not there: whatever needs one says which extra to install, and all else works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import environment, run_script
from unlatch import lookup

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def without(monkeypatch):
    """Make packages look as if they were not installed."""

    def hide(package: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


def test_digits_without_scikit_learn(unlatch, conf, without):
    without("sklearn")
    result = unlatch("train", conf)
    assert result.exit_code == 2
    assert "pip install 'unlatch[digits]'" in result.stderr
    assert "Traceback" not in result.output


def test_a_proven_placement_without_scipy(unlatch, costs, without):
    without("scipy")
    layers = [{"name": str(time), "F": time, "D": time, "G": time} for time in (3, 5, 7, 4, 6)]
    flags = ["--costs", costs(layers), "--method", "layerpipe", "--mode", "atomic", "--devices", 3]
    assert unlatch("plan", *flags).exit_code == 0
    refused = unlatch("plan", *flags, "--placement", "exact")
    assert refused.exit_code == 2
    assert "pip install 'unlatch[layerpipe]'" in refused.stderr


def test_a_package_that_lacks_something_itself_keeps_its_trace(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        lookup.import_extra("half_installed", "digits", "this")


def test_the_library_imports_no_package_of_an_extra():
    look = "import sys, json, unlatch, unlatch.cli.training, unlatch.demo; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], env=environment(), capture_output=True, text=True, check=True)
    assert not {"sklearn", "scipy", "transformers", "cloudpickle", "tensorboard"} & set(json.loads(done.stdout))


def test_a_run_with_nothing_to_draw_does_not_wait_for_a_plotting_library(greenhouse, conf, tmp_path):
    script = "import sys\nfrom invoking import invoke\nassert invoke('train', 'conf.toml').exit_code == 0\n"
    done = run_script(tmp_path, script + "print('matplotlib' in sys.modules)", greenhouse=greenhouse)
    assert done.stdout == "False\n", done.stderr


def test_every_extra_that_is_named_exists():
    extras = PROJECT["optional-dependencies"]
    inside = {extra for one in ("all", "dev") for line in extras[one] for extra in _named(line)}
    assert inside == set(extras) - {"dev"}
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py")]:
        assert _named(page.read_text(encoding="utf-8")) <= set(extras), page


def _named(text: str) -> set[str]:
    found = re.findall(r"(?:unlatch|\.)\[([a-z,]+)\]", text)
    return {extra for group in found for extra in group.split(",")}
