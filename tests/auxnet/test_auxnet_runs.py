"""Whole runs of AuxNet: oracles O11, O14-O17, options, statistics, checkpoints."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlatch
from rank_jobs import conv_run, copied_state, momentum_sgd
from recording import Optimizers, RecordingSGD, feed, listening
from small_nets import images, tanh_net, vectors
from unlatch.methods import AuxNet, get
from unlatch.methods.auxnet import probe as auxnet_probe
from unlatch.methods.auxnet import station as auxnet_station
from unlatch.methods.auxnet.schedule import BATCH, INPUT, STATE
from unlatch.methods.auxnet.sources import Raw
from unlatch.methods.auxnet.station import check_same, checksum
from unlatch.methods.local.stations import LOSS
from unlatch.methods.local.statistics import layer_parallel_times
from unlatch.runtime import engine
from unlatch.transport.mail import Micro

DATA = images([12, 12, 12, 5])
VARIANTS = {
    "penalty": {},
    "explicit": {"correction": "explicit", "aux_steps": 2},
    "replay": {"form": "lagrangian"},
    "synthesiser": {"form": "lagrangian", "multiplier": "synthesiser"},
    "rebuild": {"form": "lagrangian", "multiplier": "rebuild"},
    "shared": {"shared": True},
    "steps": {"stage_steps": 2},
    "mixed": {"true_share": ((0, 0.0), (3, 0.8))},
    "serial": {"serial_first": 1, "serial_every": 3},
    "serial replay": {"form": "lagrangian", "serial_first": 1, "serial_from": 3},
    "echo": {"form": "lagrangian", "echo": ((0, 0.5), (4, 1.0))},
    "ramp": {"beta": ((0, 1.0), (4, 3.0))},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_and_reports_every_batch(variant):
    run = conv_run(AuxNet(**VARIANTS[variant]), 3)
    before = copied_state(run.module())
    results = feed(run, DATA)
    assert [r.batch for r in results] == [0, 1, 2, 3]
    assert all(0.5 < r.loss < 5 for r in results)
    after = copied_state(run.module())
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"0", "1", "2", "3"}
    assert run.evaluate(DATA)["samples"] == 41


@pytest.mark.parametrize("method", ["auxnet", "auxvar", "sph", "dgl", "dni"])
def test_o11_one_stage_is_backpropagation(method):
    one, other = conv_run(method, 1), conv_run("bp", 1)
    assert [r.loss for r in feed(one, DATA)] == [r.loss for r in feed(other, DATA)]
    for a, b in zip(copied_state(one.module()).values(), copied_state(other.module()).values(), strict=True):
        assert torch.equal(a, b)


def test_o14_other_data_is_noticed():
    x, y = DATA[0]
    raw, micro = Raw(x, y), Micro(3, 3, 0, 1, 12, 1.0, 3, True)
    check_same(raw, checksum((x, y)), micro, stage=1)
    with pytest.raises(unlatch.errors.DataError, match=r"stage 1 has other data for batch 3 .* same sampler seed"):
        check_same(raw, checksum((x + 1e-6, y)), micro, stage=1)


def sent(run, data) -> list[tuple[str, int, list[int]]]:
    """What goes through the mail: kind, receiver, elements of each tensor."""
    with listening() as messages:
        feed(run, data)
    return [(m.kind, m.stage, [t.numel() for t in unlatch.nn.tree.flatten(m.payload)[0]]) for m in messages]


@pytest.mark.parametrize(("options", "tensors"), [({}, 1), ({"form": "lagrangian"}, 2)])
def test_o15_two_border_tensors_per_batch_and_no_gradient(options, tensors):
    run = conv_run(AuxNet(**options), 3)
    messages = sent(run, DATA[:3])
    sizes = {1: 12 * 8 * 8 * 8, 2: 12 * 12 * 4 * 4}
    for border, size in sizes.items():
        assert [s for kind, to, s in messages if (kind, to) == (INPUT, border - 1)] == [[size] * tensors] * 3
        assert [s for kind, to, s in messages if (kind, to) == (STATE, border)] == [[size]] * 3
    assert {kind for kind, _, _ in messages} == {BATCH, INPUT, STATE, LOSS}
    assert not any(s for kind, _, s in messages if kind == LOSS)


def test_o15_a_multiplier_rides_on_the_predicted_input_where_nothing_is_normalised():
    run = conv_run(AuxNet(form="lagrangian", border_norm=False), 2)
    messages = sent(run, DATA[:2])
    assert [len(s) for kind, _, s in messages if kind == INPUT] == [1, 1]


class Hand:
    """A clock that only moves when it is told to, in place of the module `time`."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    """A layer that takes a known time in both directions."""

    def __init__(self, hand: Hand, seconds: float = 0.004) -> None:
        super().__init__()
        self.layer, self.hand, self.seconds = nn.Linear(5, 5), hand, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.hand.now += self.seconds
        out: Tensor = self.layer(x)
        if out.requires_grad:
            out.register_hook(self._backward)
        return out

    def _backward(self, gradient: Tensor) -> Tensor:
        self.hand.now += 2 * self.seconds
        return gradient


def test_o16_measured_terms_predict_the_step_time_and_where_the_gain_begins(monkeypatch):
    hand = Hand()
    monkeypatch.setattr(engine, "time", hand)
    net = nn.Sequential(*[Slow(hand) for _ in range(9)]).double()
    ((x, y),) = vectors(1)
    run = unlatch.parallelize(
        net,
        AuxNet(factory=lambda border: Slow(hand).double()),
        stages=3,
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        split=["3", "6"],
        sample=(x, y),
    )
    for _ in range(12):
        run.step(x, y)
    measured = run.method_statistics()
    times = layer_parallel_times(measured)
    assert times.forward == pytest.approx(9 * 0.004)
    assert times.backward == pytest.approx(9 * 0.008)
    assert times.aux_forward + times.aux_backward == pytest.approx(0.012)
    slowest = max(sum(s.seconds.values()) / s.micros for s in measured)
    assert times.step(3) == pytest.approx(slowest)
    assert 1.0 < times.break_even < 2.0
    assert times.speed_up(1) < 1.0 < times.speed_up(2) < times.speed_up(3) < times.limit


def test_o17_no_adjoint_leaves_pure_imitation():
    """Without adjoint term and imitation nothing moves the AuxNet; with the adjoint alone something does."""

    def moved(**options) -> bool:
        run = conv_run(AuxNet(imitate=0.0, **options), 2)
        net = run.stations[1].source.module
        before = copied_state(net.parts)
        feed(run, DATA[:2])
        names = [n for n, _ in net.parts.named_parameters()]
        weights = copied_state(net.parts)
        return any(not torch.allclose(before[n], weights[n], rtol=0, atol=1e-3) for n in names)

    assert moved()
    assert not moved(ablation="no-adjoint")


def test_o17_frozen_stages_stay():
    run = conv_run(AuxNet(ablation="frozen"), 3)
    before = {n: p.detach().clone() for n, p in run.module().named_parameters()}
    feed(run, DATA)
    moved = {n.split(".")[0] for n, p in run.module().named_parameters() if not torch.equal(before[n], p)}
    assert moved == {"3"}


def test_o17_shallow_is_backpropagation_through_auxnet_and_last_stage():
    run = conv_run(AuxNet(ablation="shallow"), 3, lr_scheduler=None, clip_grad_norm=None)
    station = run.stations[2]
    net, last = station.source.module, station.stage.module
    before = {n: p.detach().clone() for n, p in run.module().named_parameters()}
    twin_net, twin_last = copy.deepcopy(net), copy.deepcopy(last)
    losses = [r.loss for r in feed(run, DATA)]
    optimizers = [momentum_sgd(list(m.parameters())) for m in (twin_net, twin_last)]
    for number, (x, y) in enumerate(DATA):
        with unlatch.nn.replayable(3, 2 + (1 << 32), number):
            lam = twin_net(x)
        with unlatch.nn.replayable(3, 2, number):
            loss = cross_entropy(twin_last(lam), y)
        assert float(loss.detach()) == pytest.approx(losses[number], rel=1e-6)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(
        [*net.parameters(), *last.parameters()], [*twin_net.parameters(), *twin_last.parameters()], strict=True
    ):
        torch.testing.assert_close(a, b)
    still = {n for n, p in run.module().named_parameters() if torch.equal(before[n], p)}
    assert {n.split(".")[0] for n in still} == {"0", "1", "2"}
    assert run.evaluate(DATA) == run.evaluate(DATA, path="auxiliary") != run.evaluate(DATA, path="serial")


@pytest.mark.parametrize("method", ["auxnet", "dgl", "auxvar"])
def test_micro_batches_and_accumulation_add_up_to_the_whole_batch(method):
    def weights(sizes: int, **options) -> list[Tensor]:
        net, data = tanh_net(4), vectors(1, size=8)[0]
        exact = {"border_norm": False} if method == "auxnet" else {}
        run = unlatch.parallelize(
            net,
            get(method, **exact, **options),
            stages=2,
            loss_fn=nn.functional.mse_loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            split=["2"],
            sample=data,
        )
        parts = [t.tensor_split(sizes) for t in data]
        feed(run, list(zip(*parts, strict=True)))
        return [p.detach() for p in net.parameters()]

    whole = weights(1)
    for other in (weights(1, microbatches=4), weights(2, accumulate=2)):
        for a, b in zip(whole, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "method",
    [
        AuxNet(),
        AuxNet(form="lagrangian"),
        AuxNet(form="lagrangian", multiplier="synthesiser", aux_optimizer=partial(torch.optim.Adam, lr=1e-3)),
        AuxNet(shared=True),
        get("auxvar", form="lagrangian"),
        get("sph"),
        get("dgl"),
        get("dni"),
    ],
    ids=lambda m: f"{m.name}-{getattr(m, 'multiplier', '')}-{getattr(m, 'shared', '')}",
)
def test_a_resumed_run_continues_exactly(method, tmp_path):
    data = images([12, 12, 12, 12])
    data = data + data
    whole = conv_run(method, 3)
    feed(whole, data[:5])
    whole.save(tmp_path / "at5")
    feed(whole, data[5:])
    rest = conv_run(method, 3)
    rest.load(tmp_path / "at5")
    feed(rest, data[5:])
    for (name, a), b in zip(copied_state(whole.module()).items(), copied_state(rest.module()).values(), strict=True):
        assert torch.equal(a, b), name


def test_checkpoints_pass_between_methods_and_stage_counts(tmp_path):
    run = conv_run("auxnet", 3)
    feed(run, DATA)
    run.save(tmp_path / "c")
    for method, stages in (("bp", 1), ("auxnet", 2), ("dgl", 4)):
        other = conv_run(method, stages)
        other.load(tmp_path / "c")
        for a, b in zip(copied_state(run.module()).values(), copied_state(other.module()).values(), strict=True):
            assert torch.equal(a, b)
        feed(other, DATA)


def test_recalibration_reports_both_and_changes_nothing():
    run = conv_run("auxnet", 3)
    feed(run, DATA)
    before = copied_state(run.module())
    plain = run.evaluate(DATA)
    both = run.evaluate_recalibrated(DATA, DATA)
    assert {k: both[k] for k in plain} == plain
    assert both["recalibrated_loss"] != plain["loss"]
    for a, b in zip(before.values(), copied_state(run.module()).values(), strict=True):
        assert torch.equal(a, b)
    # The statistics used are those of the serial network on these batches: one batch, evaluated with its own.
    single = run.evaluate_recalibrated(DATA[:1], DATA[:1])
    module = run.module().train()
    for dropout in module.modules():
        if isinstance(dropout, nn.Dropout):
            dropout.eval()
    # Running variances are unbiased, batch norm in training is not.
    expected = float(cross_entropy(module(DATA[0][0]), DATA[0][1]).detach())
    assert single["recalibrated_loss"] == pytest.approx(expected, rel=0.02)


def test_a_long_run_keeps_the_newest_measurements_only(monkeypatch):
    for module in (auxnet_station, auxnet_probe):
        monkeypatch.setattr(module, "MOST_RECORDS", 3)
    run = conv_run(AuxNet(form="lagrangian", measure=1, probe=1), 3)
    feed(run, DATA * 2)
    newest = list(range(2 * len(DATA)))[-3:]
    for stage in run.method_statistics():
        assert [record.update for record in stage.records] == ([] if stage.stage == 0 else newest)
        assert [update for update, _, _ in stage.cosines] == newest


def test_statistics_tell_what_happens_at_every_border():
    run = conv_run(AuxNet(form="lagrangian", measure=2, probe=1), 3)
    feed(run, DATA)
    first, second, third = run.method_statistics()
    assert not first.records
    assert first.capacity is None
    assert [r.update for r in second.records] == [0, 2]
    for stage in (second, third):
        assert all(r.violation > 0 and r.jump > 0 and r.multiplier > 0 and r.loss > 0 for r in stage.records)
        assert 0 < stage.capacity.flop_ratio <= 1.0
        assert f"border{stage.stage}/violation" in stage.metrics()
    assert all(len(s.cosines) == 4 and all(-1 <= c <= 1 for _, c, _ in s.cosines) for s in (first, second, third))
    assert {"forward", "backward", "update", "aux_forward", "aux_backward"} <= set(second.seconds)


def test_the_last_stage_at_the_true_input_has_cosine_one():
    run = conv_run(AuxNet(true_share=1.0, probe=1), 2)
    feed(run, DATA)
    last = run.method_statistics()[1]
    assert all(c == pytest.approx(1.0, abs=1e-5) and r == pytest.approx(1.0, abs=1e-4) for _, c, r in last.cosines)


def test_an_auxnet_with_every_block_begins_as_a_copy():
    net, ((x, y),) = tanh_net(4), vectors(1)
    run = unlatch.parallelize(
        net,
        AuxNet(border_norm=False, depth=5, measure=1),
        stages=2,
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        split=["2"],
        sample=(x, y),
    )
    run.step(x, y)
    last = run.method_statistics()[1]
    assert last.records[0].violation == 0
    assert last.capacity.flop_ratio == last.capacity.parameter_ratio == 1.0


def test_an_echo_mixes_in_the_gradient_at_the_true_state_of_the_batch_before():
    net, data, share = tanh_net(4), vectors(2), 0.3
    recorded = Optimizers(RecordingSGD, lr=0.0)
    run = unlatch.parallelize(
        net,
        AuxNet(echo=share, aux_optimizer=partial(torch.optim.SGD, lr=0.0)),
        stages=2,
        loss_fn=nn.functional.mse_loss,
        optimizer=recorded,
        split=["2"],
        sample=data[0],
    )
    source = run.stations[1].source
    expected = []
    for number, (x, y) in enumerate(data):
        terms = [(1.0 if number == 0 else 1.0 - share, source.module(x).detach(), y)]
        if number:
            terms.append((share, net[:2](data[0][0]).detach(), data[0][1]))
        loss = sum(weight * nn.functional.mse_loss(net[2:](h), target) for weight, h, target in terms)
        expected.append(torch.autograd.grad(loss, list(net[2:].parameters())))
        run.step(x, y)
    for found, true in zip(recorded[1].gradients, expected, strict=True):
        for a, b in zip(found, true, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-15)


def test_the_graph_of_an_auxnet_counts_as_memory_of_its_stage() -> None:
    """Once for each batch: a prediction that was corrected is gone."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))

    def peaks(width: int, batches: int) -> list[int]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3))
        wide = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5))
        with unlatch.parallelize(
            model,
            unlatch.methods.AuxNet(factory=lambda border: wide, border_norm=False, measure=1000),
            stages=2,
            split=["1"],
            sample=(x, y),
            loss_fn=nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        ) as run:
            for _ in range(batches):
                run.step(x, y)
            return [stage.peak_bytes for stage in run.statistics()]

    small, large = peaks(10, 3), peaks(1010, 3)
    assert large[0] == small[0]
    # What tanh gives is kept once: 4 bytes for each of 8 samples and 1000 units.
    assert large[1] - small[1] == 4 * 8 * 1000
    assert peaks(1010, 1) == large
