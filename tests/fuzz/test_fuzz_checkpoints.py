"""Checkpoints that were cut off, damaged, or edited by somebody who also put the checksums right."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import unlatch
from fuzzing import altered, cases, damaged, outcome
from unlatch.errors import CheckpointMismatch, UnlatchError
from unlatch.io import checkpoint
from unlatch.io.checkpoints import Checkpoints

BATCHES = [(torch.full((4, 3), 0.1 * n), torch.tensor([0, 1, 0, 1])) for n in range(5)]


def started(method: str = "dtr") -> unlatch.Run:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return unlatch.parallelize(
        model,
        method,
        stages=2,
        loss_fn=torch.nn.functional.cross_entropy,
        split=["1"],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )


@pytest.fixture(scope="module", params=["exact", "drained"])
def sound(request, tmp_path_factory) -> Path:
    """A checkpoint with batches under way, and one without."""
    path = tmp_path_factory.mktemp("sound") / "checkpoint"
    with started() as run:
        for x, y in BATCHES[:3]:
            run.step(x, y)
        run.save(path, exact=request.param == "exact")
    return path


def loaded(path: Path, method: str = "dtr") -> None:
    """What comes of it is a run that trains on, or a `CheckpointMismatch` that names the place."""
    with started(method) as run:
        found = outcome(run.load, path)
        if isinstance(found, UnlatchError):
            assert isinstance(found, CheckpointMismatch), found
            assert path.name in str(found)
        else:
            outcome(run.step, *BATCHES[3])
            outcome(run.flush)


def sealed(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `state.json` with a checksum that is right."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / checkpoint.STATE).write_text(json.dumps({"sha256": digest, **manifest}))


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / checkpoint.STATE).read_text())
    del found["sha256"]
    return found


def copied(sound: Path, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sound, path)
    return path


def test_the_checkpoints_are_sound(sound, tmp_path):
    path = copied(sound, tmp_path)
    sealed(path, manifest_of(path))
    for method in ("dtr", "bp", "pipedream"):
        with started(method) as run:
            run.load(path)
            run.step(*BATCHES[3])


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_damaged_files(sound, tmp_path):
    files = {file.name: file.read_bytes() for file in sound.iterdir()}

    @cases(80, share=0.1)
    @given(st.sampled_from(sorted(files)).flatmap(lambda name: st.tuples(st.just(name), damaged(files[name]))))
    def check(case: tuple[str, bytes]) -> None:
        path = copied(sound, tmp_path)
        (path / case[0]).write_bytes(case[1])
        if case[1] != files[case[0]]:
            assert isinstance(outcome(checkpoint.read, path), CheckpointMismatch) or case[0] == checkpoint.STATE
        loaded(path)

    check()


# States are long: what hypothesis thinks of that is not the point of a failure.
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@pytest.mark.parametrize("method", ["dtr", "bp"])
def test_edited_states(sound, tmp_path, method):
    """Loaded where it could go on as it was, and where it has to be rebuilt and drained first."""
    manifest = manifest_of(sound)

    @cases(120, share=0.1)
    @given(st.one_of(altered(manifest, most=2), altered(manifest["state"]).map(lambda s: {**manifest, "state": s})))
    def check(edited: Any) -> None:
        path = copied(sound, tmp_path)
        if isinstance(edited, dict):
            sealed(path, edited)
        else:
            (path / checkpoint.STATE).write_text(json.dumps(edited))
        loaded(path, method)

    check()


def test_edited_tensors(sound, tmp_path):
    """Tensors that are missing, too many, or of another shape or type, in files whose checksums are right."""
    manifest = manifest_of(sound)
    names = {file: sorted(load_file(sound / file)) for file in manifest["files"]}
    everything = [(file, name) for file, found in names.items() for name in found]
    replacements = {
        "gone": None,
        "empty": torch.zeros(0),
        "scalar": torch.tensor(1.0),
        "whole numbers": torch.arange(6).reshape(2, 3),
        "huge": torch.zeros(1000, 3),
        "not finite": torch.full((4, 3), torch.nan),
    }

    @cases(60, share=0.05)
    @given(
        st.lists(st.tuples(st.sampled_from(everything), st.sampled_from(sorted(replacements))), min_size=1, max_size=2)
    )
    def check(changes: list[tuple[tuple[str, str], str]]) -> None:
        path = copied(sound, tmp_path)
        edited = json.loads(json.dumps(manifest))
        for (file, name), how in changes:
            tensors = load_file(path / file)
            new = replacements[how]
            if new is None:
                tensors.pop(name, None)
            else:
                tensors[name] = new.clone()
            save_file(tensors, path / file)
            raw = (path / file).read_bytes()
            edited["files"][file] |= {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
        sealed(path, edited)
        loaded(path)

    check()


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model", ".safetensors", "x\0.safetensors", ""]
)
def test_files_elsewhere_are_not_read(sound, tmp_path, name):
    path = copied(sound, tmp_path)
    manifest = manifest_of(path)
    manifest["files"][name] = manifest["files"]["model.safetensors"]
    sealed(path, manifest)
    with pytest.raises(CheckpointMismatch, match="files"):
        checkpoint.read(path)


@cases(100)
@given(damaged(b'{"10": 0.5, "20": 0.75}'))
def test_scores(tmp_path, raw):
    (tmp_path / "scores.json").write_bytes(raw)
    checkpoint.write(tmp_path / "step-00000010", checkpoint.Checkpoint({"w": torch.ones(1)}, {}))
    outcome(Checkpoints(tmp_path).landed, 10, 0.5)


@pytest.mark.parametrize("target", ["/etc", "..", "step-1/../..", "nowhere", "step-00000099", "latest"])
def test_links_that_lead_elsewhere(tmp_path, target):
    checkpoint.write(tmp_path / "step-00000010", checkpoint.Checkpoint({"w": torch.ones(1)}, {}))
    (tmp_path / "latest").symlink_to(target)
    assert Checkpoints(tmp_path).latest() == tmp_path / "step-00000010"


def test_random_numbers_out_of_bounds_used_to_end_in_an_overflow(sound, tmp_path):
    path = copied(sound, tmp_path)
    manifest = manifest_of(path)

    def negated(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: negated(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [negated(inner) for inner in value]
        return -value - 1 if isinstance(value, int) and abs(value) > 10**6 else value

    manifest["state"] = negated(manifest["state"])
    sealed(path, manifest)
    loaded(path)
