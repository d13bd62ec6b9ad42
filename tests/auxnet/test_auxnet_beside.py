"""What is trained beside the network: its learning rate, its size, its place in checkpoints, its time."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from rank_jobs import conv_run, plain_sgd
from recording import feed
from small_nets import images, tanh_net, vectors
from unlatch.methods import AuxNet, AuxVar
from unlatch.methods.local.statistics import LocalStatistics, layer_parallel_times
from unlatch.models import build
from unlatch.nn.auxiliary import Capacity
from unlatch.runtime.events import Event, Recorder
from unlatch.transport.mail import Mail, Message

DATA = images([12, 12, 12])


@pytest.mark.parametrize("options", [{"correction": "explicit", "aux_steps": 3}, {"stage_steps": 3}, {}])
def test_repeated_steps_are_one_update_of_the_learning_rate_schedule(options):
    """A schedule of as many steps as there are batches was over before them."""
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=len(DATA) + 1)
    run = conv_run(AuxNet(**options), 2, lr_scheduler=cycle)
    feed(run, DATA)
    stage, net = run.stations[1].stage.updater, run.stations[1].source.net.updater
    assert stage.scheduler.last_epoch == net.scheduler.last_epoch == len(DATA)
    assert stage.optimizer.param_groups[0]["lr"] == net.optimizer.param_groups[0]["lr"]


def test_the_size_of_every_auxnet_is_told():
    run = conv_run("auxnet", 3)
    sizes = [part.capacity for part in run.method_statistics()]
    assert sizes[0] is None
    assert run.notes == [f"the AuxNet of stage {k} has {sizes[k]}" for k in (1, 2)]
    blocks = build("resnet20")
    (x, y) = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    large = unlatch.parallelize(
        blocks,
        "auxnet",
        stages=2,
        split=["layer3.0"],
        sample=(x, y),
        loss_fn=cross_entropy,
        optimizer=plain_sgd,
    )
    size = large.method_statistics()[1].capacity
    # Stem, one block at 16 channels, one from 16 to 32: weights of convolutions, then of batch norms.
    expected = 27 * 16 + 2 * 16 * 16 * 9 + 16 * 32 * 9 + 32 * 32 * 9 + 2 * (16 + 2 * 16 + 2 * 32)
    assert size.parameters == expected
    assert large.notes == [f"the AuxNet of stage 1 has {size}"]
    assert f"{expected:,} parameters" in large.notes[0]


def test_the_size_does_not_depend_on_the_sample():
    """FLOPs of a sample of one were halved."""
    x, y = vectors(1)[0]
    sizes = [
        unlatch.parallelize(
            tanh_net(6), "auxnet", stages=2, loss_fn=mse_loss, optimizer=plain_sgd, split=["4"], sample=(x[:n], y[:n])
        )
        .method_statistics()[1]
        .capacity
        for n in (1, 2, 5)
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    assert sizes[0].flops == 2 * 5 * 5 * 2


def test_single_vectors_at_a_normalised_border_are_warned_of(caplog):
    x, y = vectors(1)[0]

    def build_with(count: int, **options: Any) -> str:
        caplog.clear()
        unlatch.parallelize(
            tanh_net(4),
            AuxNet(**options),
            stages=2,
            loss_fn=mse_loss,
            optimizer=plain_sgd,
            split=["2"],
            sample=(x[:count], y[:count]),
        )
        return caplog.text

    warning = "a single vector has no variance"
    assert warning in build_with(1)
    assert warning in build_with(2, microbatches=2)
    assert warning not in build_with(2)
    assert warning not in build_with(1, border_norm=False)


@pytest.mark.parametrize(
    ("norm", "options", "warned"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, {"pull": 1.0}, False),
        (False, {"beta": 0.03}, False),
        (False, {"pull": 1.0, "beta": 30.0}, True),
        (False, {"ablation": "shallow"}, False),
    ],
)
def test_a_strong_pull_on_stages_that_do_not_normalise_is_warned_of(norm, options, warned, caplog):
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    unlatch.parallelize(
        build("mlp", widths=(6, 5, 5, 5, 3), batch_norm=norm),
        AuxNet(**options),
        stages=3,
        loss_fn=cross_entropy,
        optimizer=plain_sgd,
        split=["layers.1", "layers.3"],
        sample=(x, y),
    )
    assert ("nothing normalises in stage 0, 1, so that its steps grow" in caplog.text) == warned


def test_a_table_of_other_stages_is_not_taken_over(tmp_path, caplog):
    """The stages disagreed on which samples were known, and waited for each other for ever."""
    run = conv_run("auxvar", 2)
    feed(run, DATA)
    run.save(tmp_path / "c")
    other = conv_run("auxvar", 3)
    other.load(tmp_path / "c")
    assert "cut at blocks [0, 2], this one is cut at [0, 1, 3]" in caplog.text
    assert [r.batch for r in feed(other, DATA)] == [3, 4, 5]


def test_a_table_without_multipliers_continues_with_zeros(tmp_path):
    """Without them the run went on as a penalty method, whatever its form was called."""
    run = conv_run(AuxVar(), 2)
    feed(run, DATA)
    run.save(tmp_path / "c")
    other = conv_run(AuxVar(form="lagrangian"), 2)
    other.load(tmp_path / "c")
    source = other.stations[1].source
    stored = source.tensors()
    assert stored["multipliers"].shape == stored["inputs"].shape
    assert not stored["multipliers"].any()
    feed(other, DATA)
    assert source.tensors()["multipliers"].any()


def test_copies_of_a_shared_network_stay_in_step_after_a_checkpoint_of_other_stages(tmp_path):
    """The lower ones were taken from the checkpoint and the upper ones were not."""
    run = conv_run(AuxNet(shared=True), 2)
    feed(run, DATA)
    run.save(tmp_path / "c")
    other = conv_run(AuxNet(shared=True), 4)
    other.load(tmp_path / "c")
    parts = [other.stations[k].source.module.parts for k in (1, 2, 3)]
    for one, next_one in pairwise(parts):
        for p, q in zip(one.parameters(), next_one.parameters(), strict=False):
            assert torch.equal(p, q)


def test_an_auxnet_of_another_kind_begins_anew_and_says_so(tmp_path, caplog):
    def other(border: Any) -> nn.Module:
        return nn.Conv2d(3, border.shape[0], 3, padding=1)

    run = conv_run(AuxNet(), 2)
    feed(run, DATA)
    run.save(tmp_path / "c")
    conv_run(AuxNet(factory=other), 2).load(tmp_path / "c")
    assert "the auxnet of stage 1 in the checkpoint is another network" in caplog.text


def test_times_are_those_of_this_process(tmp_path):
    """A resumed run divided its seconds by all batches ever trained."""
    run = conv_run(AuxNet(microbatches=2), 2)
    feed(run, DATA)
    assert [(s.micros, s.batches) for s in run.method_statistics()] == [(6, 3)] * 2
    run.save(tmp_path / "c")
    rest = conv_run(AuxNet(microbatches=2), 2)
    rest.load(tmp_path / "c")
    feed(rest, DATA[:1])
    assert [(s.micros, s.batches) for s in rest.method_statistics()] == [(2, 1)] * 2


def test_everything_that_backpropagation_does_not_do_counts_as_overhead():
    work = {"forward": 2.0, "backward": 4.0, "update": 2.0}
    stages = [
        LocalStatistics(0, {**work, "border": 1.0}, micros=4, batches=2),
        LocalStatistics(1, {**work, "border": 0.5, "trial": 3.0, "echo": 0.5, "aux_forward": 1.0}, micros=4, batches=2),
    ]
    times = layer_parallel_times(stages, data=0.25)
    assert (times.data, times.forward, times.backward) == (0.25, 2.0, 6.0)
    assert (times.border, times.aux_forward, times.aux_backward) == (2.0, 0.5, 0.0)
    assert times.step(2) == 0.25 + 2.5 + 4.0
    assert times.summary(2)["speed_up"] == 8.25 / 6.75
    assert times.summary(2)["break_even_stages"] == 8.0 / 5.5


def test_the_formula_in_words_where_it_never_pays():
    stages = [LocalStatistics(k, {"forward": 1.0, "aux_forward": 5.0}, 1, 1) for k in (0, 1)]
    times = layer_parallel_times(stages)
    assert "pays at no number of stages" in times.text(2)
    assert times.summary(2)["break_even_stages"] is None


def test_recalibration_follows_the_way_that_is_evaluated():
    """The statistics of a shallow network came from the serial one, which it does not use."""
    run = conv_run(AuxNet(ablation="shallow"), 2)
    feed(run, DATA)
    x, y = DATA[0]
    station = run.stations[1]
    found = run.evaluate_recalibrated([(x, y)], [(x, y)])["recalibrated_loss"]
    module = station.stage.module
    module.eval()
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.train()
    expected = float(cross_entropy(module(station.source.evaluate(x)), y).detach())
    # Running variances are unbiased, batch norm in training is not.
    assert found == pytest.approx(expected, rel=0.02)


def test_messages_travel_while_stages_compute(monkeypatch):
    """A stage tells its neighbours before it computes, and listens only when it needs the answer."""
    net, data = tanh_net(6), vectors(1)
    run = unlatch.parallelize(
        net, "auxnet", stages=3, loss_fn=mse_loss, optimizer=plain_sgd, split=["2", "4"], sample=data[0]
    )
    said: list[tuple[int, str]] = []
    take, add, send = Mail.take, Recorder.add, Mail.send

    def taking(mail: Mail, kind: str, stage: int, *args: Any) -> Message:
        said.append((stage, f"take {kind}"))
        return take(mail, kind, stage, *args)

    def adding(recorder: Recorder, event: Event) -> None:
        said.append((event.stage, event.kind))
        add(recorder, event)

    def sending(mail: Mail, message: Message) -> None:
        # What is sent stands behind the event of its sender.
        said.append((said[-1][0], f"send {message.kind}"))
        send(mail, message)

    monkeypatch.setattr(Mail, "take", taking)
    monkeypatch.setattr(Recorder, "add", adding)
    monkeypatch.setattr(Mail, "send", sending)
    run.step(*data[0])
    assert [what for stage, what in said if stage == 1] == [
        *("take batch", "D", "send batch"),
        *("P", "send input", "F", "send state"),
        *("take input", "S", "B", "U", "take state", "C", "V"),
        *("take loss", "O", "send loss"),
    ]


def test_a_capacity_in_words():
    assert str(Capacity(1200, 4800, 3_000_000, 12_000_000)) == (
        "1,200 parameters and 3,000,000 FLOPs per sample, 25 % and 25 % of the blocks it stands for"
    )
