"""Bugs that were found, each with the test that found it made small."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as schedules

import part_jobs
import unlatch
from order_jobs import begun
from recording import Optimizers, RecordingSGD, feed
from small_nets import tanh_net, vectors
from unlatch.errors import ConfigError, DataError, PeerLost, PlanError, StageFailed, TransportError
from unlatch.plan.layer_costs import LayerCost
from unlatch.runtime.metering import PeakMeter
from unlatch.schedule import Periodic, buffers, steady_buffers, streams, ticked
from unlatch.transport.mail import FORWARD, Message
from unlatch.transport.wire import Envelope, Reader, Sealed, Writer


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_pipedream_2bw_with_one_stage_trained_at_the_weights_before_the_last_update():
    losses = []
    for method in ("pipedream-2bw", "bp"):
        run = unlatch.parallelize(tanh_net(1), method, stages=1, loss_fn=mse_loss, optimizer=sgd)
        losses.append([run.step(x, y).loss for x, y in vectors(4)])
    assert losses[0] == losses[1]


class ToComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.linear(x))


class ToReal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def test_no_gradient_came_back_through_complex_activations():
    torch.manual_seed(0)
    model = nn.Sequential(ToComplex(), ToReal())
    optimizers = Optimizers(RecordingSGD, lr=0.0)
    run = unlatch.parallelize(model, "dtr", stages=2, loss_fn=mse_loss, optimizer=optimizers, split=["1"])
    x, y = vectors(1)[0]
    feed(run, [(x, y)])
    mse_loss(model(x), y).backward()
    assert torch.equal(optimizers[0].gradients[0][0], model[0].linear.weight.grad)


def opened(sealed: Sealed) -> Envelope:
    reader = Reader(0)
    return reader.envelope(reader.head(sealed.header), sealed.body)


def test_five_tensors_of_four_kilobytes_did_not_fit_into_a_message():
    sealed = Writer().seal(Message(FORWARD, 1, None, [torch.zeros(1024)] * 5))
    assert len(opened(sealed).blocks) == len(sealed.blocks) == 3


def test_conjugated_views_arrived_unconjugated():
    sent = torch.tensor([1 + 2j]).conj()
    found = opened(Writer().seal(Message(FORWARD, 1, None, sent))).message().payload
    assert torch.equal(found, sent)


def test_a_damaged_label_was_trained_on():
    """Behind the header, where the form is described beside it, and later inside of it."""
    writer, reader = Writer(), Reader(0)
    message = Message(FORWARD, 1, None, torch.full((4,), 255, dtype=torch.uint8))
    first = writer.seal(message)
    assert first.body is not None
    damaged = torch.where(first.body == 255, 254, first.body)
    with pytest.raises(TransportError, match="damaged"):
        opened(first._replace(body=damaged))
    reader.envelope(reader.head(first.header), first.body)
    second = writer.seal(message)
    assert second.body is None
    second.header[second.header == 255] = 254
    with pytest.raises(TransportError, match="damaged"):
        reader.head(second.header)


def test_schedules_made_of_schedules_started_again_after_a_resume(tmp_path):
    def warmup_then_decay(optimizer: torch.optim.Optimizer) -> schedules.SequentialLR:
        first = schedules.LinearLR(optimizer, 0.1, total_iters=4)
        return schedules.SequentialLR(optimizer, [first, schedules.ExponentialLR(optimizer, 0.5)], [4])

    def start() -> unlatch.Run:
        return unlatch.parallelize(
            tanh_net(1), stages=1, loss_fn=mse_loss, optimizer=sgd, lr_scheduler=warmup_then_decay
        )

    data, run, again = vectors(8), start(), start()
    feed(run, data[:3])
    run.save(tmp_path / "checkpoint")
    again.load(tmp_path / "checkpoint")
    assert [r.loss for r in feed(again, data[3:])] == [r.loss for r in feed(run, data[3:])]


def test_evaluating_nothing_waited_for_ever():
    run = unlatch.parallelize(tanh_net(1), stages=1, loss_fn=mse_loss, optimizer=sgd)
    with pytest.raises(DataError, match="needs a loader"):
        run.evaluate(None)


def test_stopped_ranks_returned_no_results_without_an_error():
    ranks = unlatch.Ranks(1)
    ranks.close(force=True)
    with pytest.raises(PeerLost, match="start new ranks"):
        ranks.run(int)


@pytest.mark.parametrize("method", ["dtr", "fr", "fdg", "pipedream"])
def test_a_batch_that_changed_in_place_while_under_way_was_trained_on(method):
    method = unlatch.methods.get(method, microbatches=1)
    run = unlatch.parallelize(tanh_net(2), method, stages=2, loss_fn=mse_loss, optimizer=sgd, split=["1"])
    data = vectors(3)
    for x, y in data:
        run.step(x, y)
    data[-1][0].mul_(2)
    with pytest.raises(StageFailed, match="in place"):
        run.flush()


def test_common_mistakes_are_answered_in_words():
    """An optimizer instance, a plan of other stages, a loss per sample and odd loaders gave bare Python errors."""
    from torch import nn

    import unlatch
    from unlatch.errors import ConfigError, DataError, PlanError, ShapeMismatch

    def start(**changes):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        settings = {"stages": 2, "loss_fn": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
        return unlatch.parallelize(model, "bp", **(settings | changes))

    plan = start().plan
    with pytest.raises(ConfigError, match="called once per stage"):
        start(optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(PlanError, match="2 stages, but stages=1"):
        start(stages=1, plan=plan)
    x, y = torch.zeros(4, 3), torch.zeros(4, 2)
    with pytest.raises(ShapeMismatch, match="one number"):
        start(loss_fn=lambda a, b: (a - b).square()).step(x, y)
    with pytest.raises(DataError, match="pairs"):
        unlatch.Trainer(start()).fit([(x, y, y)])
    with pytest.raises(DataError, match="no batch"):
        unlatch.Trainer(start()).fit([])
    with pytest.raises(ConfigError, match="order="):
        unlatch.methods.Compose().schedule(2)


def test_the_state_of_a_run_forgot_batches_that_waited_to_be_joined():
    def start():
        method = unlatch.methods.DTRP(microbatches=1, compensate=2)
        return unlatch.parallelize(tanh_net(2), method, stages=2, loss_fn=mse_loss, optimizer=sgd, split=["1"])

    data, run, again = vectors(8), start(), start()
    feed(run, data[:3])
    again.restore(run.state())
    assert [r.loss for r in feed(again, data[3:])] == [r.loss for r in feed(run, data[3:])]
    assert [r.loss for r in again.flush()] == [r.loss for r in run.flush()]


def test_evaluation_took_training_data_that_a_schedule_had_left_waiting():
    def late(stages: int) -> Periodic:
        entries = ticked(stages).entries
        return Periodic(stages, tuple(replace(entry, offset=entry.offset + 1) for entry in entries))

    losses = []
    for evaluates in (False, True):
        method = unlatch.methods.Compose(order=late, microbatches=1)
        run = unlatch.parallelize(tanh_net(2), method, stages=2, loss_fn=mse_loss, optimizer=sgd, split=["1"])
        feed(run, vectors(3))
        if evaluates:
            assert run.evaluate(vectors(2, seed=9))["samples"] == 12
        losses.append([r.loss for r in run.flush()])
    assert losses[0] == losses[1]


def test_the_room_of_what_follows_a_warmup_was_that_of_the_warmup():
    schedule = unlatch.methods.AuxNet(form="lagrangian", serial_first=30).schedule(4)
    seen, whole = steady_buffers(schedule), buffers(streams(schedule, [1] * 60))
    assert seen.room.keys() >= whole.room.keys()
    assert seen.room["batch", 0, 1] == whole.room["batch", 0, 1] == 4
    assert seen.in_flight == whole.in_flight


@pytest.mark.parametrize("order", [3, lambda stages: None])
def test_an_order_that_is_no_schedule_gave_a_bare_python_error(order):
    with pytest.raises(ConfigError, match="compose: order must"):
        unlatch.methods.Compose(order=order).schedule(2)


def test_errors_called_a_place_away_from_home_by_the_number_of_a_layer_that_does_not_exist():
    run = begun("layerpipe")
    layers = run.schedule.stages
    away = [station.title for number, station in run.stations.items() if number >= layers]
    assert away
    assert all(int(title.removeprefix("layer ").split(" on device ")[0]) < layers for title in away)


@pytest.mark.parametrize("method", ["dgl", "auglocal"])
def test_local_heads_failed_in_half_precision(method):
    data = [(x.float(), y.float()) for x, y in vectors(3)]
    settings = {"loss_fn": mse_loss, "optimizer": sgd, "split": ["1"], "sample": data[0], "precision": "bf16"}
    run = unlatch.parallelize(tanh_net(2).float(), method, stages=2, **settings)
    assert all(r.loss is not None for r in feed(run, data)[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"serial_every": 4, "accumulate": 2},
        {"serial_every": 4, "microbatches": 2},
        {"serial_from": 6, "accumulate": 2},
        {"serial_first": 3, "accumulate": 2},
    ],
)
def test_updates_that_mix_serial_and_replayed_batches_are_refused(options):
    """A serial update took half of the gradients of a replayed one along, whose other half was never applied."""
    with pytest.raises(ConfigError, match="would mix both"):
        unlatch.methods.AuxNet(form="lagrangian", **options)
    unlatch.methods.AuxNet(form="lagrangian", serial_first=4, accumulate=2)


class Sharpened(nn.Module):
    """Does more in its forward than its blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tanh_net(3)

    def blocks(self) -> list[nn.Module]:
        return list(self.body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * 3


def test_a_model_that_does_more_than_its_blocks_was_trained_without_it_when_there_was_no_sample():
    (batch,) = vectors(1)
    for enter in (lambda r: r.step(*batch), lambda r: unlatch.Trainer(r).fit([batch]), lambda r: r.evaluate([batch])):
        run = unlatch.parallelize(Sharpened(), stages=2, loss_fn=mse_loss, optimizer=sgd)
        with pytest.raises(PlanError, match=r"Sharpened.forward and the composition of its blocks\(\) differ"):
            enter(run)


def columns_are_alike(run: unlatch.Run) -> bool:
    """Whether the stages of two replicas in this process have the same weights."""
    stages = [station.stage for _, station in sorted(run.stations.items())]
    half = len(stages) // 2
    both = zip(stages[:half], stages[half:], strict=True)
    return all(torch.equal(p, q) for one, other in both for p, q in zip(one.params, other.params, strict=True))


def test_further_replicas_of_a_network_that_is_cut_inside_of_a_block_were_cut_elsewhere():
    run = part_jobs.begun("1f1b", part_jobs.SKIP, replicas=2)
    feed(run, part_jobs.pictures(3))
    assert columns_are_alike(run)


def test_a_learning_rate_set_by_the_user_held_for_the_first_replica_only():
    run = unlatch.parallelize(tanh_net(2), "1f1b", stages=2, loss_fn=mse_loss, optimizer=sgd, replicas=2)
    data = vectors(4)
    run.step(*data[0])
    for optimizer in run.optimizers.values():
        optimizer.param_groups[0]["lr"] = 0.01
    feed(run, data[1:])
    assert columns_are_alike(run)


def test_a_prediction_went_on_from_the_weights_before_a_load(tmp_path):
    method = unlatch.methods.DTRP(predict="difference", microbatches=1)
    settings = {"stages": 2, "split": ["1"], "loss_fn": mse_loss, "optimizer": sgd}
    other, data = tanh_net(2), vectors(6)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    expected = float(mse_loss(other(data[0][0]), data[0][1]).detach())
    unlatch.parallelize(other, method, **settings).save(tmp_path / "other", exact=False)
    run = unlatch.parallelize(tanh_net(2), method, **settings)
    feed(run, data)
    run.load(tmp_path / "other", optimizer=False)
    assert feed(run, data[:3])[0].loss == pytest.approx(expected, rel=1e-12)


def test_an_earlier_checkpoint_in_a_run_with_fp16_left_overflows_without_effect(tmp_path):
    """The numbers of updates went back, and what was known of later ones did not."""
    run = unlatch.parallelize(tanh_net(2).float(), "1f1b", stages=2, loss_fn=mse_loss, optimizer=sgd, precision="fp16")
    data = [(x.float(), y.float()) for x, y in vectors(25)]
    large = [(x, 1e4 * y) for x, y in data]
    run.step(*data[0])
    run.save(tmp_path / "early", exact=False)
    feed(run, [*data[1:], large[0]])
    run.load(tmp_path / "early")
    before = [p.detach().clone() for p in run.module().parameters()]
    feed(run, large[:16])
    assert any(not torch.equal(p, q) for p, q in zip(run.module().parameters(), before, strict=True))


def test_costs_of_layerpipe_from_a_settings_file_ended_in_a_type_error():
    tables = [{"name": str(n), "F": cost, "D": cost, "G": cost} for n, cost in enumerate((1, 2, 4))]
    costs = tuple(LayerCost(**table) for table in tables)
    given, meant = (unlatch.methods.LayerPipe(costs=found) for found in (tables, costs))
    assert [layer.F for layer in given.costs] == [layer.F for layer in meant.costs]
    run = unlatch.parallelize(tanh_net(3), given, stages=2, loss_fn=mse_loss, optimizer=sgd)
    assert run.plan.tasks
    with pytest.raises(ConfigError, match="layerpipe: costs: layer 0"):
        unlatch.methods.LayerPipe(costs=[{"name": "0"}])
    with pytest.raises(ConfigError, match="layerpipe: costs is a file or a list of layers"):
        unlatch.methods.LayerPipe(costs=3)


def test_a_metered_graph_that_never_went_backward_stayed_in_memory():
    """Its saved outputs held the graph that held them, where no collector looks."""
    meter = PeakMeter([])
    with meter.measuring():
        output = torch.randn(8, 4, requires_grad=True).relu()
    assert meter.peak == 8 * 4 * 4
    gone = weakref.ref(output)
    del output
    assert gone() is None


def test_tasks_of_layerpipe_kept_the_input_of_every_batch():
    """The first layer held anew what it had taken, for uses that were over."""
    costs = tuple(LayerCost(str(n), cost, cost, cost) for n, cost in enumerate((1, 2, 4)))
    run = unlatch.parallelize(
        tanh_net(3), unlatch.methods.LayerPipe(costs=costs), stages=2, loss_fn=mse_loss, optimizer=sgd
    )
    feed(run, vectors(6))
    run.flush()
    assert {index: station.kept_bytes for index, station in run.stations.items() if station.kept_bytes} == {}
