"""A checkpoint with batches under way is finished on load where it cannot go on as it was."""

from __future__ import annotations

import hashlib
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from order_jobs import CASES, begun, data
from unlatch.errors import CheckpointMismatch
from unlatch.methods import get

SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def another(method: str = "bp", stages: int = 2, optimizer=SGD) -> unlatch.Run:
    torch.manual_seed(9)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    split = ["2", "3"][: stages - 1]
    return unlatch.parallelize(
        model, method, stages=stages, loss_fn=mse_loss, optimizer=optimizer, split=split, sample=data()[0]
    )


def velocities(run: unlatch.Run) -> dict[str, torch.Tensor]:
    names = {id(p): name for name, p in run.module().named_parameters()}
    optimizers = [s.stage.updater.optimizer for s in run.stations.values() if s.stage is not None]
    return {names[id(p)]: state["momentum_buffer"] for o in optimizers for p, state in o.state.items()}


@pytest.mark.parametrize(
    ("case", "accumulate"),
    [*((case, 1) for case in CASES), *((case, 2) for case in ("pipedream", "petra", "dtrp", "layerpipe", "dgl"))],
)
def test_any_run_is_finished_on_load(case, accumulate, tmp_path):
    run = begun(case, accumulate)
    for x, y in data():
        run.step(x, y)
    run.save(tmp_path / "checkpoint")
    run.flush()
    expected = {name: t.clone() for name, t in run.module().state_dict().items()}
    for method, stages in (("bp", 1), ("dtr", 2)):
        other = another(method, stages)
        progress = other.load(tmp_path / "checkpoint")
        assert progress["batches"] == len(data())
        for name, t in other.module().state_dict().items():
            assert torch.equal(t, expected[name]), name
        if run.schedule.stages == run.schedule.stations:
            for name, t in velocities(run).items():
                assert torch.equal(velocities(other)[name], t)
        assert other.step(*data()[0]).step == len(data()) + 1


def test_plain_pytorch_reads_the_newest_weights(tmp_path):
    run = begun("pipedream")
    for x, y in data():
        run.step(x, y)
    run.save(tmp_path / "checkpoint")
    weights = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert weights.keys() == run.module().state_dict().keys()
    assert all(torch.equal(weights[name], t) for name, t in run.module().state_dict().items())


def test_another_optimizer_takes_the_weights_alone(tmp_path):
    run = begun("pipedream")
    for x, y in data():
        run.step(x, y)
    run.save(tmp_path / "checkpoint")
    newest = {name: t.clone() for name, t in run.module().state_dict().items()}
    other = another(optimizer=torch.optim.Adam)
    with pytest.raises(CheckpointMismatch, match="written with SGD, this run uses Adam: pass optimizer=False"):
        other.load(tmp_path / "checkpoint")
    other.load(tmp_path / "checkpoint", optimizer=False)
    # What was under way cannot be finished without the optimizer that was at work.
    assert all(torch.equal(t, newest[name]) for name, t in other.module().state_dict().items())


def test_a_method_that_no_file_can_describe(tmp_path):
    def factory(border):
        return nn.Linear(6, 6)

    def start():
        return unlatch.parallelize(
            nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]),
            get("auxnet", factory=factory),
            stages=2,
            loss_fn=mse_loss,
            optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
            split=["1"],
            sample=data()[0],
        )

    run = start()
    for x, y in data():
        run.step(x, y)
    run.save(tmp_path / "checkpoint")
    again = start()
    again.load(tmp_path / "checkpoint")
    assert again.step(*data()[0]).step == len(data()) + 1
    torch.manual_seed(0)
    other = unlatch.parallelize(
        nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]),
        "bp",
        stages=1,
        loss_fn=mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    )
    with pytest.raises(CheckpointMismatch, match=r"its options hold functions.*save with exact=False"):
        other.load(tmp_path / "checkpoint")


def test_another_model(tmp_path):
    begun("pipedream").save(tmp_path / "checkpoint")
    other = unlatch.parallelize(
        nn.Sequential(nn.Linear(6, 6)), stages=1, loss_fn=mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    with pytest.raises(CheckpointMismatch, match=r"is not a checkpoint of this model: missing \['0.bias'"):
        other.load(tmp_path / "checkpoint")


def test_a_checkpoint_of_the_first_format(tmp_path):
    run = begun("pipedream")
    for x, y in data():
        run.step(x, y)
    run.save(tmp_path / "checkpoint", exact=False)
    file = tmp_path / "checkpoint" / "state.json"
    manifest = json.loads(file.read_text())
    del manifest["sha256"], manifest["state"]["run"], manifest["state"]["random"]
    manifest["format"] = 1
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    other = another()
    assert other.load(tmp_path / "checkpoint")["batches"] == len(data())
    expected = run.module().state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in other.module().state_dict().items())
