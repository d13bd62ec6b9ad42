"""What cannot work under PETRA is refused before training, with the name of the block; what it does is said."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from recording import feed
from rev_nets import regression, rev_net, rev_run
from unlatch.errors import ConfigError, NonFiniteLoss, PlanError
from unlatch.methods import PETRA
from unlatch.models import build
from unlatch.nn import Coupling, Merge, Split, Streams

sgd = partial(torch.optim.SGD, lr=0.01)


class WrongInverse(nn.Module):
    """Forgets a factor on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, state: Streams) -> Streams:
        return state[0] * self.scale, state[1]

    def inverse(self, state: Streams) -> Streams:
        return state


def images(classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 8, 8), torch.randint(classes, (8,))


def head(channels: int) -> nn.Sequential:
    return nn.Sequential(Merge(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))


def parallelize(model: nn.Sequential, method: Any = "petra", **options: Any) -> unlatch.Run:
    split = [str(i) for i in range(1, len(model))]
    settings: dict[str, Any] = {"loss_fn": cross_entropy, "optimizer": sgd, "split": split, **options}
    return unlatch.parallelize(model, method, stages=len(settings["split"]) + 1, **settings)


def with_middle(middle: nn.Module, channels: int = 8, out: int | None = None) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), Split())
    return nn.Sequential(stem, Coupling(nn.Conv2d(channels // 2, channels // 2, 1)), middle, head(out or channels))


def test_an_inverse_that_is_none() -> None:
    with pytest.raises(PlanError, match=r"block '2' is declared reversible, but inverse\(forward\(x\)\) differs .* by"):
        parallelize(with_middle(WrongInverse()), sample=images())


class UnfinishedInverse(WrongInverse):
    def inverse(self, state: Streams) -> Streams:
        raise NotImplementedError("to be done")


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (WrongInverse(), r"block '2' is declared reversible, but inverse\(forward\(x\)\) differs .* by 1\.00e\+00"),
        (UnfinishedInverse(), r"block '2' is declared reversible, .* failed with NotImplementedError: to be done"),
    ],
)
def test_without_a_sample_the_first_batch_finds_it_before_any_update(middle: nn.Module, message: str) -> None:
    """It used to train on, with a warning that blamed the learning rate."""
    model = with_middle(middle)
    before = [p.detach().clone() for p in model.parameters()]
    run = parallelize(model)
    with pytest.raises(PlanError, match=message):
        run.step(*images())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_data_that_are_not_finite_are_not_blamed_on_the_inverse() -> None:
    x, y = images()
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteLoss):
        parallelize(with_middle(Coupling(nn.Conv2d(4, 4, 1)))).step(x, y)


def test_a_stored_stage_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"store names stage 4, but the model is cut into 4: .* from 0 to 3"):
        parallelize(with_middle(Coupling(nn.Identity())), PETRA(store=(1, 4)))


def test_an_inverse_nobody_uses_is_not_checked() -> None:
    for method in ("dsp", PETRA(store=(2,)), PETRA(inputs="store")):
        parallelize(with_middle(WrongInverse()), method, sample=images())


def test_channels_that_do_not_split() -> None:
    model = with_middle(Coupling(nn.Identity()))
    model[0] = nn.Sequential(nn.Conv2d(3, 7, 1), Split())
    with pytest.raises(PlanError, match=r"block '0' .* 7 channels do not split into two equal streams"):
        parallelize(model, sample=images())
    run = parallelize(model)
    with pytest.raises(PlanError, match="block '0': 7 channels do not split"):
        run.step(*images())


def test_a_coupling_that_changes_the_shape() -> None:
    model = with_middle(Coupling(nn.Conv2d(4, 4, 3, stride=2, padding=1)))
    text = r"shape \(., 4, 8, 8\) of the stream it is added to, got \(., 4, 4, 4\)"
    with pytest.raises(PlanError, match=rf"block '2' fails on its input .*{text}"):
        parallelize(model, sample=images())
    run = parallelize(model)
    with pytest.raises(PlanError, match=rf"block '2': .*{text}"):
        run.step(*images())


def test_one_tensor_where_two_streams_are_needed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Coupling(nn.Conv2d(8, 8, 1)), head(8))
    with pytest.raises(PlanError, match=r"block '1' .*a coupling needs two streams.* put Split\(\) before"):
        parallelize(model, sample=images())


def test_a_network_that_is_not_reversible_is_refused_by_name() -> None:
    """It used to train on as DSP, and said so in the notes only."""
    with pytest.raises(PlanError, match=r"\(block '0' of stage 0, block '1' of stage 1, .* store=\(0, 1, 2\)"):
        parallelize(rev_net("SDDH"))
    with pytest.raises(PlanError, match=r"\(blocks '0', '1', '2' and 1 more of stage 0\): take a reversible"):
        parallelize(rev_net("SDDDH"), split=["4"])
    with pytest.raises(PlanError, match=r"cut the model so that its reversible blocks come below the last stage"):
        parallelize(rev_net("SDRRH"), split=["1", "2"])
    with pytest.raises(PlanError, match=r"store=\(0, 1, 2\)"):
        parallelize(rev_net("SDDH"), PETRA(store=(0, 1)))


def test_inputs_may_be_kept_knowingly(caplog: pytest.LogCaptureFixture) -> None:
    for method in (PETRA(store=(0, 1, 2)), PETRA(inputs="store"), "dsp"):
        assert not [note for note in parallelize(rev_net("SDDH"), method).notes if "stored" in note]
    assert not [note for note in parallelize(rev_net("SRRH")).notes if "stored" in note]
    assert (
        parallelize(rev_net("SDDH"), PETRA(store=(1,)), split=[], loss_fn=mse_loss).step(*regression(1)[0]).batch == 0
    )
    assert "stored" not in caplog.text


def test_stages_that_store_are_named_where_others_do_not(caplog: pytest.LogCaptureFixture) -> None:
    apart = ". Start a stage before and after these blocks"
    for starts, text in (
        ([1, 3, 6], "inputs are stored at stage 2 (block '3'), which cannot be computed back" + apart),
        ([1, 3, 4, 6], "inputs are stored at stage 2 (block '3'), which cannot be computed back"),
        ([3, 6], "inputs are stored at stage 0 (block '0'), stage 1 (block '3'), which cannot be computed back; so"),
    ):
        caplog.clear()
        run = rev_run("SRRDRRH", "petra", sgd, starts)
        (note,) = [note for note in run.notes if "stored" in note]
        assert note.startswith(text)
        assert (apart in note) == (starts != [1, 3, 4, 6])
        assert note in caplog.messages


def test_the_models_of_the_library_pass_the_check() -> None:
    for name, classes in (("revnet8", 10), ("irevnet", 10), ("revnet-fixed", 10)):
        model = build(name, width=4, in_channels=1)
        x, y = torch.randn(4, 1, 8, 8), torch.randint(classes, (4,))
        run = unlatch.parallelize(model, "petra", stages=4, loss_fn=cross_entropy, optimizer=sgd, sample=(x, y))
        assert run.step(x, y).step == 1


def test_a_bad_reconstruction_is_named_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    """Learning at a rate at which weights run away between forward and backward."""
    options = {"loss_fn": mse_loss}
    with caplog.at_level(logging.WARNING, "unlatch"):
        run = rev_run("SRRH", PETRA(microbatches=1, store=(0,)), partial(torch.optim.SGD, lr=2.0), **options)
        feed(run, regression(20))
    worst = run.statistics()[1].reconstruction_error
    assert worst is not None
    assert worst > 0.5
    told = [note for note in run.notes if "reconstructs its input" in note]
    assert any(note.startswith("stage 1 ") and "store=(0, 1)" in note for note in told)
    assert len(told) == len({note.split()[1] for note in told})
    assert all(note in caplog.text for note in told)


def test_what_only_the_end_of_training_shows_is_told_too() -> None:
    """With as few batches as this, the errors are measured while the pipeline is emptied."""
    run = rev_run("SRRRRH", PETRA(microbatches=1, tolerance=1e-9), partial(torch.optim.SGD, lr=0.5))
    unlatch.Trainer(run).fit(regression(4))
    assert {note.split(" reconstructs")[0] for note in run.notes if "reconstructs" in note} == {
        f"stage {stage}" for stage in (1, 2, 3, 4)
    }


def test_the_tolerance_is_an_option() -> None:
    def told(method: PETRA, lr: float) -> list[str]:
        run = rev_run("SRRH", method, partial(torch.optim.SGD, lr=lr))
        feed(run, regression(20))
        return [note for note in run.notes if "reconstructs its input" in note]

    assert told(PETRA(microbatches=1), 0.01) == []
    assert len(told(PETRA(microbatches=1, tolerance=1e-6), 0.01)) == 2
    assert told(PETRA(microbatches=1, tolerance=1e-6, inputs="store"), 0.01) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be above 0 and finite, got 0.0"),
        ({"tolerance": "much"}, "tolerance must be above 0 and finite, got 'much'"),
        ({"store": 1}, r"store lists numbers of stages, .* such as store=\(1, 2\); got 1"),
        ({"store": "12"}, "store lists numbers of stages, .* got '12'"),
        ({"store": (1.5,)}, "store lists numbers of stages, .* got "),
        ({"store": (-1,)}, "store lists numbers of stages, counted from 0"),
        ({"inputs": "keep"}, "inputs must be one of reverse, store, got 'keep'"),
        ({"weights": "latest"}, "weights must be one of current, stash, average, got 'latest'"),
        ({"order": "2f2b"}, "order must be one of ticked, 1f1b"),
        ({"bn": "both"}, "bn must be one of forward, backward"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PETRA(**options)
