"""What `pip install .` installs works without the repository, and is what the package needs and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What a package of Python with pages in it consists of.
ENDINGS = {".py", ".typed", ".html", ".js", ".css"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (found,) = folder.glob("*.whl")
    return found


def _run(*command: str, cwd: Path, path: str = "") -> str:
    """Output of a command whose Python sees nothing beside `path` and the installed packages."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a clone, to list its files"
)
def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    listed = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", "src/unlatch", cwd=ROOT).split()
    sources = {path.removeprefix("src/") for path in listed if (ROOT / path).exists()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    information = {name for name in packed if ".dist-info/" in name}
    assert packed - information == sources
    assert {Path(name).name for name in information} == {"METADATA", "WHEEL", "entry_points.txt", "LICENSE", "RECORD"}
    assert {name for name in sources if Path(name).suffix not in ENDINGS} == set()
    assert "unlatch/py.typed" in packed


def test_installed_it_helps_explains_and_trains_the_file_of_the_readme(wheel: Path, tmp_path: Path) -> None:
    installed, folder = tmp_path / "installed", tmp_path / "anywhere"
    folder.mkdir()
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(installed))
    _run(sys.executable, *pip, str(wheel), cwd=folder)
    unlatch, path = str(installed / "bin" / "unlatch"), str(installed)

    where = "import unlatch; print(unlatch.__file__)"
    assert Path(_run(sys.executable, "-c", where, cwd=folder, path=path).strip()).is_relative_to(installed)
    assert "train" in _run(unlatch, "--help", cwd=folder, path=path)
    assert "dtrp" in _run(unlatch, "methods", "dtrp", cwd=folder, path=path)

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    settings = re.search(r"```toml\n# digits\.toml\n(.*?)```", readme, re.S)
    assert settings is not None
    (folder / "digits.toml").write_text(settings[1], encoding="utf-8")
    short = ("--epochs", "1", "--set", "model.name=resnet8", "--set", "data.subset=256")
    assert "accuracy" in _run(unlatch, "train", "digits.toml", *short, cwd=folder, path=path)
    assert (folder / "runs" / "dtrp-1" / "summary.json").exists()
