"""Every example runs as its header says, stays short, and says something true at the end."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
HOSTS = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

#: What each example prints, as a pattern; accuracies far above guessing (0.1), far below what is reached.
EXPECTED = {
    "quickstart.py": r"epoch 2: .* test accuracy 0\.[89]",
    "two_processes.py": r"rank 0: .* bit for bit: True\nrank 1: .* bit for bit: True",
    "torchrun.py": r"test accuracy 0\.[89]",
    "own_model.py": r"balance \d+%\ntest accuracy 0\.[89]",
    "own_loop.py": r"test accuracy 0\.[89]\d*\nlayers\.0\.linear\.bias ",
    "compose.py": r"dtr on 1f1b: lateness \(2, 1, 0\), .* test accuracy 0\.[89]",
    "with_lightning.py": r"after 3 epochs: loss 0\.\d+, test accuracy 0\.[89]",
    "with_accelerate.py": r"epoch 2: loss 0\.\d+\ntest accuracy 0\.[89]\d*\n\d+ parameters on cpu",
    "with_transformers.py": r"loss 3\.\d+ before, 0\.\d+ after; accuracy (0\.9|1\.0).*\n.* True",
    "petra_transformer.py": r"dtr keeps 49, 66, 0 kB .*\npetra keeps 66, 0, 0 kB .*\ntest accuracy 0\.[5-9]",
    "auxnet.py": r"AuxNet\(.*accuracy 0\.[89]\d*\n.*AuxNet\(ablation='shallow'.*\n.* FLOPs per sample",
    "layerpipe_plan.py": r"pipedream 1\.45 .*, layerpipe 1\.81\n(.*\n)+test accuracy 0\.[89]",
    "new_method.py": r"Slow\(microbatches=8, .*\): test accuracy 0\.[89]",
}


#: Packages that an example is about, and that Unlatch does not need; their own warnings are theirs.
ABOUT = {"with_lightning.py": "lightning", "with_accelerate.py": "accelerate", "with_transformers.py": "transformers"}


def run_example(name: str, folder: Path, *launcher: str) -> str:
    """Output of an example that is run from another folder, as a user would after installing the package."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "torchrun.py"])
def test_example_runs(name: str, tmp_path: Path) -> None:
    if (package := ABOUT.get(name)) is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    warnings = ("-W", "error") if package is None else ()
    assert re.search(EXPECTED[name], run_example(name, tmp_path, *warnings)), name
    assert list(tmp_path.iterdir()) == []


def test_torchrun_gives_what_one_process_gives(tmp_path: Path) -> None:
    alone = run_example("torchrun.py", tmp_path, "-W", "error")
    assert re.search(EXPECTED["torchrun.py"], alone)
    assert run_example("torchrun.py", tmp_path, *TORCHRUN) == alone
    # Two hosts, as the header says, both of them this machine; the first one prints.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hosts = [(*HOSTS, "--master-port", port, "--node-rank", str(rank)) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        printed = [pool.submit(run_example, "torchrun.py", tmp_path, *host) for host in hosts]
    assert [one.result() for one in printed] == [alone, ""]


def test_every_example_is_tested_and_short() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    assert files.keys() == EXPECTED.keys()
    assert {name: len(text.splitlines()) for name, text in files.items() if len(text.splitlines()) > 60} == {}
