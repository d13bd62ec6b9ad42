"""A checkpoint written by two ranks is read by any number of stages, any method, plain PyTorch; resuming is exact."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, mse_loss

import edge_jobs
import unlatch
from rank_jobs import conv_run, differences, falling, momentum_sgd
from recording import stages_of
from small_nets import conv_net, images, tanh_net, vectors

METHODS = ["bp", "zb-h2", "pipedream", "pipedream-2bw", "fr", "fdg", "dtrp"]


@pytest.mark.parametrize("name", METHODS)
def test_resuming_is_exact(ranks2, name, tmp_path):
    path = str(tmp_path / "checkpoint")
    unbroken = ranks2.run(edge_jobs.saves_and_goes_on, name, path)
    resumed = ranks2.run(edge_jobs.resumes, name, path)
    inline = edge_jobs.resumes(name, path)
    for found in (*unbroken[1:], *resumed, inline):
        assert differences({"state": unbroken[0]["saved"]}, {"state": found["saved"]}) == []
        assert differences(unbroken[0]["later"], found["later"]) == []
        assert found["evaluation"] == unbroken[0]["evaluation"]
    rates = {0.05 * falling(4)}
    assert [found["rates"] for found in (*unbroken, *resumed, inline)] == [rates] * 5


def test_other_stages_methods_and_plain_pytorch(ranks2, tmp_path):
    path = tmp_path / "checkpoint"
    written = ranks2.run(edge_jobs.saves_and_goes_on, "dtrp", str(path))[0]
    for name, stages in (("bp", 1), ("dtrp", 3), ("gpipe", 4), ("fdg", 1)):
        found = edge_jobs.resumes(name, str(path), stages)
        assert differences({"state": written["saved"]}, {"state": found["saved"]}) == []
        assert found["evaluation"]["loss"] == pytest.approx(written["evaluation"]["loss"], rel=1e-6)
        assert found["rates"] == written["rates"]
        assert [batch for _, batch, _ in found["later"]["steps"]] == [4, 5, 6, 7]

    model = conv_net(seed=8)
    model.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    x, y = images([9], seed=2)[0]
    with torch.no_grad():
        loss = float(cross_entropy(model.eval()(x), y))
    assert loss == pytest.approx(written["evaluation"]["loss"], rel=1e-6)


def test_momentum_arrives_under_the_original_names(ranks2, tmp_path):
    path = tmp_path / "checkpoint"
    ranks2.run(edge_jobs.saves_and_goes_on, "1f1b", str(path))
    buffers = load_file(path / "optim.safetensors")
    with conv_run("dtr", 3) as run:
        run.load(path)
        names = {id(p): name for name, p in run.module().named_parameters()}
        for stage in stages_of(run):
            for p, state in stage.updater.optimizer.state.items():
                assert torch.equal(state["momentum_buffer"], buffers.pop(f"{names[id(p)]}/momentum_buffer"))
    assert not buffers


def test_weights_alone_leave_the_optimizer_fresh(ranks2, tmp_path):
    path = tmp_path / "checkpoint"
    written = ranks2.run(edge_jobs.saves_and_goes_on, "bp", str(path))[0]
    with conv_run("bp", 2) as run:
        run.load(path, optimizer=False)
        assert differences({"state": written["saved"]}, {"state": dict(run.module().state_dict())}) == []
        assert edge_jobs.learning_rates(run) == {0.05}
        assert not any(stage.updater.optimizer.state for stage in stages_of(run))
        assert run.step(*images([8])[0]).batch == 0


def test_synchronous_training_goes_on_the_same_with_other_stages(tmp_path):
    """Without dropout nothing knows about stages, so a new cut must not change a single bit."""
    data = vectors(8)

    def start(stages):
        return unlatch.parallelize(
            tanh_net(4),
            "bp",
            stages=stages,
            loss_fn=mse_loss,
            optimizer=momentum_sgd,
            split=[str(k) for k in range(1, stages)],
        )

    first = start(2)
    for x, y in data[:4]:
        first.step(x, y)
    first.save(tmp_path / "checkpoint")
    expected = [first.step(x, y).loss for x, y in data[4:]]
    for stages in (1, 3, 4):
        run = start(stages)
        run.load(tmp_path / "checkpoint")
        assert [run.step(x, y).loss for x, y in data[4:]] == expected


def test_a_failed_save_is_known_on_every_rank(ranks2, tmp_path):
    one, other = ranks2.run(edge_jobs.cannot_save, str(tmp_path))
    assert one == other
    assert "taken" in one
    assert "choose another place" in one
