"""The documentation is code too: its examples run, its commands parse, its settings load, its links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from docs_scripts import docs_script
from unlatch import config, methods
from unlatch.cli import app
from unlatch.cli.settings import JUDGES
from unlatch.config.study import load_study

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Fence(NamedTuple):
    """A fenced block: `line` is where its text begins."""

    page: Path
    language: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(page: Path, *languages: str) -> list[Fence]:
    """The fenced blocks of a page in some languages."""
    text = page.read_text(encoding="utf-8")
    found = [
        Fence(page, match[1], text[: match.start(2)].count("\n") + 1, match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    ]
    return [fence for fence in found if fence.language in languages]


def pages_with(*languages: str) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if fences(page, *languages)]


def run_as_script(fence: Fence, folder: Path) -> None:
    """Blocks that start processes must be files, as they must be for users."""
    (folder / "script.py").write_text(fence.text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{fence.place}\n{done.stderr}"


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = dict(methods.base.METHODS)
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for fence in fences(page, "python"):
            if "__main__" in fence.text:
                run_as_script(fence, tmp_path)
                continue
            # Blank lines in front, so that a traceback shows the line of the page.
            code = compile("\n" * (fence.line - 1) + fence.text, str(page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, names)
    finally:
        # Methods that a page registers must not reach other tests.
        methods.base.METHODS.clear()
        methods.base.METHODS.update(known)


@pytest.mark.parametrize("page", pages_with("pycon"))
def test_shown_output_is_the_real_one(page: Path) -> None:
    names: dict[str, Any] = {}
    runner = doctest.DocTestRunner(optionflags=SHOWN)
    report = io.StringIO()
    for fence in fences(page, "pycon"):
        test = doctest.DocTestParser().get_doctest(fence.text, names, fence.place, str(page), fence.line - 1)
        runner.run(test, out=report.write, clear_globs=False)
        names |= test.globs
    assert runner.failures == 0, report.getvalue()
    assert runner.tries > 0


@pytest.mark.parametrize("page", pages_with("toml"))
def test_settings_load(page: Path, tmp_path: Path) -> None:
    for fence in fences(page, "toml"):
        (tmp_path / "settings.toml").write_text(fence.text)
        if "[study]" in fence.text:
            assert load_study(tmp_path / "settings.toml", JUDGES).runs()
            continue
        loaded = config.load(tmp_path / "settings.toml")
        methods.get(loaded.method.name, **loaded.method.options)


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_parse(page: Path) -> None:
    """Commands and flags exist; nothing is run."""
    commands = typer.main.get_command(app)
    for fence in fences(page, "sh"):
        for line in fence.text.splitlines():
            words = shlex.split(line, comments=True)
            starts = [n for n, word in enumerate(words) if word == "unlatch" and (n == 0 or words[n - 1] == "-m")]
            if starts:
                arguments = words[starts[0] + 1 :]
                root = commands.make_context("unlatch", ["--help"], resilient_parsing=True)
                name, command, rest = commands.resolve_command(root, arguments)  # type: ignore[attr-defined]
                assert command is not None, f"{fence.place}: no command {arguments[0]}"
                command.make_context(name, rest)
            for file in re.findall(r"\b(?:examples|benchmarks|docs)/\w+\.py\b", line):
                assert (ROOT / file).is_file(), f"{fence.place}: {file}"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    broken = [link for link in targets if not _leads_somewhere(page, link)]
    assert broken == []


def _leads_somewhere(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return False
    if not anchor:
        return True
    heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
    return anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_named_tests_and_files_exist(page: Path) -> None:
    """`tests/...py::name` and `src/...` in a page are promises of where to look."""
    text = page.read_text(encoding="utf-8")
    missing = []
    for file, name in re.findall(r"`((?:tests|src|benchmarks|examples|docs)/[\w/.\-]+?\.\w+)(?:::(\w+))?`", text):
        path = ROOT / file
        if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
            missing.append(f"{file}::{name}" if name else file)
    assert missing == []


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_every_code_block_says_what_it_is(page: Path) -> None:
    """A block without a language, or in one that nothing checks, could rot."""
    known = {"python", "pycon", "toml", "sh", "text"}
    known |= {"diff"}  # checked by test_migration.py
    known |= {"{toctree}", "{include}", "{eval-rst}"}  # for the site, which test_site.py builds
    assert [fence for fence in openings(page.read_text(encoding="utf-8")) if fence not in known] == []


def openings(text: str) -> list[str]:
    """What stands behind each opening fence, however it is written."""
    lines = (re.match(r"\s*(?:```|~~~)\s*([^\s`]*)", line) for line in text.splitlines())
    return [line[1] for line in lines if line][::2]


def test_every_method_has_a_page() -> None:
    index = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    assert [name for name in methods.names() if f"`{name}`" not in index] == []


METHOD_PAGES = sorted(page for page in (ROOT / "docs" / "methods").glob("*.md") if page.name != "README.md")
#: The form of a method's page. "Measured" may follow where there is something.
FORM = ["Idea", "Picture", "Equations", "Entries", "Promises", "Found and inferred", "When to use it"]
FORM += ["Options", "Limits"]


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in METHOD_PAGES])
def test_pages_of_methods_have_one_form(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", text, re.M)
    assert heads in (FORM, [*FORM, "Measured"])
    sections = dict(zip(heads, re.split(r"^## .*$", text, flags=re.M)[1:], strict=True))
    assert [head for head, body in sections.items() if not body.strip()] == []
    idea = sections["Idea"].strip().partition("\n\n")[0]
    assert re.fullmatch(r"[A-Z][^.]*\.", idea), f"one sentence first, not: {idea}"
    assert f"](../img/methods/{page.stem}.svg)" in sections["Picture"]
    assert "`python docs/make_figures.py`" in sections["Picture"]
    assert "entry_table(" in "".join(re.findall(r"^```pycon\n(.*?)^```$", sections["Entries"], re.M | re.S))
    assert re.search(r"`tests/[\w/]+\.py", sections["Promises"])


def test_every_method_is_drawn_on_its_page(tmp_path: Path) -> None:
    """Pictures are what the library draws today, and the titles of pages name what is on them."""
    figures = docs_script("make_figures")
    assert sorted(name for names in figures.METHOD_PAGES.values() for name in names) == sorted(methods.names())
    assert sorted(figures.METHOD_PAGES) == [page.stem for page in METHOD_PAGES]
    for page in METHOD_PAGES:
        title = page.read_text(encoding="utf-8").partition(":")[0]
        assert title == f"# {', '.join(figures.METHOD_PAGES[page.stem])}"
    assert figures.IMAGE.read_text(encoding="utf-8") == figures.readme_svg(), "run `python docs/make_figures.py`"
    for drawn in figures.method_figures(tmp_path):
        kept = ROOT / "docs" / "img" / "methods" / drawn.name
        assert kept.read_bytes() == drawn.read_bytes(), "run `python docs/make_figures.py`"
        assert kept.stat().st_size < 60_000


def test_the_checks_can_fail(tmp_path: Path) -> None:
    assert openings("```pycon\n1\n```\n\n  ~~~ yaml\n~~~\n```{toctree}\n```\n") == ["pycon", "yaml", "{toctree}"]
    page = tmp_path / "page.md"
    page.write_text("```pycon\n>>> 1 + 1\n3\n```\n[gone](gone.md)\n")
    assert not _leads_somewhere(page, "gone.md")
    assert [fence.text for fence in fences(page, "pycon")] == [">>> 1 + 1\n3\n"]
