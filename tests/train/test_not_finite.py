"""NaN and infinity are found before they are applied; a run stops where it was good, or goes on without the batch."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import guard_jobs
import unlatch
from order_jobs import CASES, begun, data
from small_nets import on_plain_nets
from unlatch.errors import ConfigError, NonFinite, NonFiniteLoss
from unlatch.io import checkpoint
from unlatch.io.checkpoints import Checkpoints
from unlatch.train import guard


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "unlatch")


# ------------------------------------------------------------------------- found


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.spoils = bool((x[:, 0] > 100).any())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.inf if ctx.spoils else grad


class Spoiler(nn.Module):
    """Its first channel says whether it spoils the gradient of what is below; the first channel goes up as it is."""

    def __init__(self, spoils: bool) -> None:
        super().__init__()
        self.linear, self.spoils = nn.Linear(6, 6), spoils

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.cat([x[:, :1], torch.tanh(self.linear(x))[:, 1:]], 1)
        return _Overflow.apply(out) if self.spoils else out


def spoiled_at(stage: int, method: str, **more) -> unlatch.Run:
    torch.manual_seed(0)
    return unlatch.parallelize(
        nn.Sequential(*[Spoiler(index == stage) for index in range(3)]),
        on_plain_nets(method, 3),
        stages=3,
        loss_fn=lambda out, y: mse_loss(out[:, 1:], y[:, 1:]),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        split=["1", "2"],
        sample=data()[0],
        **more,
    )


def train(run: unlatch.Run, batches: list[guard_jobs.Batch]) -> list[unlatch.StepResult]:
    return [run.step(x, y) for x, y in batches] + run.flush()


def marked(batches: list[guard_jobs.Batch], *bad: int) -> list[guard_jobs.Batch]:
    found = [(x.clone(), y) for x, y in batches]
    for number in bad:
        found[number][0][0, 0] = 1000.0
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("method", ["bp", "gpipe", "1f1b", "pipedream", "dtrp", "petra", "dgl"])
def test_gradient_at_any_stage(method, stage):
    """Stage and batch are named, and no weight of any stage has seen it."""
    run = spoiled_at(stage, method)
    with pytest.raises(
        NonFinite, match=rf"the gradient of {stage}\.linear\.\w+ is not finite in batch 2 \(stage {stage}"
    ):
        train(run, marked(data() + data(), 2))
    assert all(p.isfinite().all() for p in run.module().parameters())


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("method", ["bp", "1f1b", "pipedream", "dtrp"])
def test_left_out_whatever_stage_finds_it(method, stage):
    runs = [spoiled_at(stage, method, nonfinite="skip") for _ in range(2)]
    batches = data() + data()
    train(runs[0], marked(batches, 3, 7))
    train(runs[1], [batch for number, batch in enumerate(batches) if number not in (3, 7)])
    assert runs[0].left_out == 2
    weights = [run.module().parameters() for run in runs]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_clipping_does_not_hide_it():
    run = spoiled_at(1, "bp", clip_grad_norm=1.0)
    with pytest.raises(
        NonFinite, match=r"the gradient of 1\.linear\.weight is not finite in batch 0 \(stage 1, after 0"
    ):
        run.step(*marked(data(), 0)[0])


def test_large_values_are_finite():
    """Their sum overflows, and so does their norm; neither is a reason to stop."""
    linear = nn.Linear(6, 6, bias=False)
    nn.init.zeros_(linear.weight)
    run = unlatch.parallelize(
        nn.Sequential(linear),
        stages=1,
        loss_fn=lambda out, y: (out * 1e38).sum(),
        optimizer=partial(torch.optim.SGD, lr=1e-38),
    )
    run.step(torch.ones(1, 6), torch.zeros(1))
    torch.testing.assert_close(run.module().state_dict()["0.weight"], torch.full((6, 6), -1.0))


def test_weights_that_overflow():
    run = unlatch.parallelize(
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)),
        "bp",
        stages=2,
        split=["1"],
        loss_fn=lambda out, y: 100 * mse_loss(out, y),
        optimizer=lambda params, stage: torch.optim.SGD(params, lr=3e38 * stage.index),
    )
    with pytest.raises(
        NonFinite, match=r"the weight 1\.weight is not finite in batch 0 \(stage 1, after 0 updates, lr 3e\+38"
    ):
        run.step(*data()[0])


def test_all_batches_of_an_update_are_named():
    run = begun("bp", accumulate=2)
    run.step(*data()[0])
    run.step(*data()[1])
    run.step(*guard_jobs.spoiled("gradient", data()[2]))
    with pytest.raises(NonFinite, match=r"in one of the batches 2 to 3 \(stage 0, after 1 updates"):
        run.step(*data()[3])


def test_ignored_if_asked_to():
    run = begun("bp", nonfinite="ignore")
    run.step(*guard_jobs.spoiled("loss", data()[0]))
    run.step(*guard_jobs.spoiled("gradient", data()[1]))
    assert any(not p.isfinite().all() for p in run.module().parameters())


def test_unknown_policy():
    with pytest.raises(ConfigError, match='nonfinite must be "stop", "skip" or "ignore", got \'go\''):
        begun("bp", nonfinite="go")


# ---------------------------------------------------------------------- left out


@pytest.mark.parametrize(
    ("cases", "kind", "accumulate"),
    [(CASES, "gradient", 1), (guard_jobs.SOME, "gradient", 2), (guard_jobs.SOME, "loss", 1)],
)
def test_as_if_never_fed(cases, kind, accumulate):
    assert guard_jobs.wrong_ones(cases, kind, accumulate, distributed=False) == []


def test_it_is_told(caplog):
    caplog.set_level(logging.WARNING, "unlatch")
    run = begun("pipedream", nonfinite="skip")
    results = train(run, guard_jobs.fed("gradient", [4]))
    told = "batch 4 of those offered is left out on all stages: the gradient of 0.0.weight is not finite in batch 4"
    assert any(told in note for note in run.notes)
    assert told in caplog.text
    assert [r.batch for r in results if r.batch is not None] == list(range(guard_jobs.BATCHES - 1))
    assert results[-1].left_out == run.left_out == 1
    assert results[-1].step == guard_jobs.BATCHES - 1


def test_no_end_of_bad_batches(monkeypatch):
    monkeypatch.setattr(guard, "_LIMIT", 3)
    run = begun("bp", nonfinite="skip")
    with pytest.raises(NonFiniteLoss, match=r"loss of batch 5 .* The 3 batches before it were left out for the like\."):
        train(run, guard_jobs.fed("loss", range(5, 15)))
    assert run.left_out == 3


def test_a_batch_under_way_in_a_loaded_state(tmp_path):
    """There is no way back to before it."""
    run = begun("pipedream")
    for x, y in guard_jobs.fed("gradient", [3])[:4]:
        run.step(x, y)
    run.save(tmp_path / "state")
    other = begun("pipedream", nonfinite="skip")
    other.load(tmp_path / "state")
    with pytest.raises(NonFinite, match=r"in batch 3 .* No state from before it was kept"):
        train(other, data())


def test_memory_of_a_batch_may_be_used_again():
    weights = []
    for reuses in (False, True):
        run, place = begun("pipedream", nonfinite="skip"), [t.clone() for t in data()[0]]
        for x, y in guard_jobs.fed("gradient", [4]):
            if reuses:
                place[0].copy_(x)
                place[1].copy_(y)
            run.step(*(place if reuses else (x, y)))
        run.flush()
        weights.append(list(run.module().parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("case", ["bp", "pipedream", "dtrp", "auxnet"])
def test_sessions(case, tmp_path):
    assert guard_jobs.sessions_everywhere([case], str(tmp_path)) == []


# ----------------------------------------------------------------------- stopped


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("case", ["bp", "pipedream", "petra", "layerpipe", "auxnet"])
def test_stop_leaves_the_last_good_state(case, kind, tmp_path):
    text = guard_jobs.stopped(case, kind, str(tmp_path / "bad"))
    latest = Checkpoints(tmp_path / "bad").latest()
    assert f"The last good state is saved in {latest}." in text
    expected = guard_jobs.gone_on(case, str(tmp_path / "good"))
    found = guard_jobs.gone_on(case, str(tmp_path / "bad"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("exact", [True, False])
def test_saving_weights_that_are_not_finite(exact, tmp_path):
    run = begun("pipedream")
    with torch.no_grad():
        dict(run.module().named_parameters())["1.0.bias"][2] = torch.inf
    with pytest.raises(NonFinite, match=r"the weight 1\.0\.bias is not finite \(stage 1, after 0 updates, lr 0\.01\)"):
        run.save(tmp_path / "state", exact=exact)
    assert not checkpoint.exists(tmp_path / "state")


def test_saving_them_on_purpose(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "unlatch")
    run = begun("pipedream", nonfinite="ignore")
    with torch.no_grad():
        dict(run.module().named_parameters())["1.0.bias"][2] = torch.inf
    run.save(tmp_path / "state")
    assert "a checkpoint is written although the weight 1.0.bias is not finite (stage 1" in caplog.text


def four_stages(**more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    return unlatch.parallelize(
        model,
        "dtr",
        stages=4,
        split=["1", "2", "3"],
        loss_fn=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        nonfinite="skip",
        **more,
    )


def classes(count, bad=()):
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        x, y = torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator)
        if number in bad:
            x[0, 0] = float("nan")
        found.append((x, y))
    return found


def test_batches_left_out_before_a_load_are_not_left_out_after_it(tmp_path):
    """One that stood where a bad one had stood was dropped without a word."""
    run = four_stages()
    for number, (x, y) in enumerate(classes(20, bad={5})):
        if number == 3:
            run.save(tmp_path / "checkpoint")
        run.step(x, y)
    assert (run.left_out, run.batches) == (1, 19)
    run.load(tmp_path / "checkpoint")
    for x, y in classes(20)[3:]:
        run.step(x, y)
    assert (run.left_out, run.batches) == (0, 20)


def test_a_state_that_is_taken_again_knows_its_place_in_the_data(tmp_path):
    """After going back over a kept state, what was saved in the end said that its pass had only begun."""
    faults = unlatch.Faults().poison(stage=0, at=18, part="gradient")
    trainer = unlatch.Trainer(four_stages(faults=faults), tmp_path)
    with pytest.raises(NonFinite, match="10 batches before it were left out"):
        trainer.fit(classes(60, bad=range(28, 45)))
    again = unlatch.Trainer(four_stages(), tmp_path)
    again.resume()
    assert again.batches_into_epoch == 20
    assert again.samples_into_epoch == 160
