"""Parts of gradients: when they leave, what they are made of, and that their sum is the plain one, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from rank_jobs import plain_sgd
from recording import feed
from replica_jobs import in_parts, train_smooth
from rev_nets import regression, rev_run
from small_nets import tanh_net, vectors
from tied_nets import TiedLM, padded, token_sum
from unlatch.advise.prediction import simulate_method
from unlatch.errors import ConfigError
from unlatch.methods import get
from unlatch.nn.tree import flatten
from unlatch.plan.layer_costs import LayerCost
from unlatch.runtime.gradient_sum import GradientSum
from unlatch.runtime.station import SENT
from unlatch.schedule import Kind, Replicated, parts_of
from unlatch.transport.mail import Mail, Micro

LAST = Micro(id=0, batch=0, index=0, count=1, size=4, scale=1.0, update=0, ends=True)


@pytest.fixture
def log(monkeypatch):
    """What is sent, in its order, beside whatever a test notes."""
    found: list[str] = []
    send = Mail.send

    def noting(mail, message):
        found.append(message.kind)
        send(mail, message)

    monkeypatch.setattr(Mail, "send", noting)
    return found


def one_stage(method, **options):
    """A network of six layers in one stage, two replicas of which are trained in this process."""
    model = tanh_net(6)
    with in_parts():
        run = unlatch.parallelize(model, method, stages=1, replicas=2, loss_fn=mse_loss, optimizer=plain_sgd, **options)
    return run, model


def note_first_layer(log, model):
    model[0][0].weight.register_post_accumulate_grad_hook(lambda _: log.append("first layer"))


@pytest.mark.parametrize("name", ["bp", "1f1b", "zb-h1", "pipedream", "dtrp"])
def test_parts_leave_while_the_backward_that_ends_an_update_still_runs(log, name):
    run, model = one_stage(name if name == "bp" else get(name, microbatches=2))
    note_first_layer(log, model)
    run.step(*vectors(1, size=8)[0])
    own = [kind for kind in log if kind.startswith("U/0") or kind == "first layer"]
    parts = run.schedule.parts[0]
    assert parts > 2
    # All micro-batches but the last are through before any part leaves, and the first layer's gradient is the last one.
    backwards = [place for place, kind in enumerate(own) if kind == "first layer"]
    early = own[backwards[-2] + 1 if len(backwards) > 1 else 0 : backwards[-1]]
    assert own.index(early[0]) == len(backwards) - 1
    assert set(early) >= {f"U/0.{n}" for n in range(parts - 2)}
    assert len(early) == len(set(early))
    assert own[-1] == f"U/0.{parts - 1}"
    assert len(own) == parts + len(backwards)


def test_what_ends_no_update_and_what_is_left_at_the_end_wait(log):
    run, model = one_stage(get("pipedream", microbatches=1, accumulate=3))
    note_first_layer(log, model)
    x, y = vectors(1, size=8)[0]
    run.step(x, y)
    run.step(x, y)
    assert not [kind for kind in log if kind.startswith("U/")]
    run.flush()
    own = [kind for kind in log if kind.startswith("U/0") or kind == "first layer"]
    assert own == ["first layer"] * 2 + [f"U/0.{n}" for n in range(run.schedule.parts[0])]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "method",
    [
        *(
            get(name) if name == "bp" else get(name, microbatches=2)
            for name in ("bp", "gpipe", "1f1b", "zb-h1", "zb-h2")
        ),
        *(get(name, microbatches=1) for name in ("pipedream", "ddg", "fr", "fdg", "adl", "dsp", "dtr", "dtrp")),
        get("pipedream", microbatches=3, accumulate=4),
        get("1f1b", microbatches=2, accumulate=4),
    ],
    ids=lambda method: f"{method.name}-{method.accumulate}",
)
def test_the_number_of_parts_changes_no_bit(method, replicas):
    options = {"replicas": replicas, "clip_grad_norm": 0.05}
    whole = train_smooth(method, 2, **options)
    with in_parts():
        parts = train_smooth(method, 2, **options)
    assert whole["losses"] == parts["losses"]
    for name, value in whole["state"].items():
        assert torch.equal(value, parts["state"][name]), name


def test_the_norm_of_the_whole_network_is_that_of_sums_of_parts():
    options = {"replicas": 3, "clip_grad_norm": 0.05, "clip_norm_of": "model"}
    whole = train_smooth(get("zb-h1", microbatches=2), 3, **options)
    with in_parts():
        parts = train_smooth(get("zb-h1", microbatches=2), 3, **options)
    assert all(torch.equal(value, parts["state"][name]) for name, value in whole["state"].items())


class Branches(nn.Module):
    """A layer that only some rows use, a weight that two layers share, and a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rare, self.shared = (nn.Linear(5, 5).double() for _ in range(3))
        self.never = nn.Linear(5, 5).double()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        x = self.shared(torch.tanh(self.shared(torch.tanh(self.first(x)))))
        if bool((x.detach().sum() > 0).item()):
            x = x + self.rare(x)
        return x * self.scale


@pytest.mark.parametrize("replicas", [2, 3])
def test_rare_shared_and_unused_weights(replicas):
    def trained(least):
        with in_parts(least):
            run = unlatch.parallelize(
                nn.Sequential(Branches(), nn.Linear(5, 5).double()),
                get("1f1b", microbatches=2),
                stages=1,
                replicas=replicas,
                loss_fn=mse_loss,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
            )
            feed(run, vectors(8, size=7))
        return run

    parts, whole = trained(64), trained(2**20)
    assert parts.schedule.parts[0] > 2
    assert whole.schedule.parts == (1,)
    states = [run.module().state_dict() for run in (parts, whole)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    # What has no gradient in any column is not decayed either.
    torch.manual_seed(0)
    assert torch.equal(states[0]["0.never.weight"], Branches().never.weight)
    for number, station in parts.stations.items():
        pairs = zip(station.stage.params, parts.stations[0].stage.params, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), number


def test_a_sparse_gradient_is_refused_by_name_in_the_backward_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Looked())
    with in_parts():
        run = unlatch.parallelize(model, "bp", stages=1, replicas=2, loss_fn=mse_loss, optimizer=plain_sgd)
    with pytest.raises(ConfigError, match=r"the gradient of 3\.table\.weight is sparse"):
        run.step(torch.randn(4, 4), torch.zeros(4, 4))


class Looked(nn.Module):
    """Adds rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, x):
        return x + self.table(torch.arange(len(x)))


def tied(method, replicas):
    run = unlatch.parallelize(
        TiedLM(), method, stages=2, split=["head"], replicas=replicas, loss_fn=token_sum, optimizer=plain_sgd
    )
    feed(run, padded(5, 6))
    return run


def reversible(method, replicas):
    """Stages that go backward block by block."""
    torch.manual_seed(0)
    run = rev_run("SRRDRRH", method, plain_sgd, starts=[1, 4], replicas=replicas)
    feed(run, regression(6))
    return run


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("train", "name"), [(tied, "zb-h1"), (tied, "pipedream"), (reversible, "petra")])
def test_tied_weights_and_reversible_stages(train, name, replicas):
    torch.manual_seed(0)
    whole = train(name, replicas).module().state_dict()
    torch.manual_seed(0)
    with in_parts():
        run = train(name, replicas)
    assert max(run.schedule.parts) > 2
    assert all(torch.equal(value, whole[key]) for key, value in run.module().state_dict().items())


# ------------------------------------------------------------------------------------------ one sum alone


def weights(sizes, dtypes=(torch.float32,)):
    return [nn.Parameter(torch.zeros(size, dtype=dtypes[n % len(dtypes)])) for n, size in enumerate(sizes)]


def sums(columns, parts, sizes=(3, 4, 2, 5), dtypes=(torch.float32,)):
    """For each column its weights and their sum."""
    found = []
    for column in range(columns):
        params = weights(sizes, dtypes)
        updater = SimpleNamespace(params=params, place=SimpleNamespace(names=[f"p{n}" for n in range(len(params))]))
        found.append((params, GradientSum([updater], column, columns, parts)))
    return found


def exchange(found, work):
    """All columns at once: `work` of each, what leaves early and what at the end, and the sum. Returns early ports."""
    parts = len(found[0][1]._parts)
    columns = len(found)
    boxes: dict[tuple[int, int], list] = {}
    early = []

    def sender(column):
        def send(micro, port, payload):
            early.append((column, port))
            place(column, port, payload)

        return send

    def place(column, port, payload):
        others = [c for c in range(columns) if c != column]
        boxes.setdefault((column, others[port // parts]), [None] * parts)[port % parts] = payload

    for column, (params, one) in enumerate(found):
        one.watching(lambda micro, params=params, column=column: work(column, params), sender(column))(LAST)
    for column, (_, one) in enumerate(found):
        for port, payload in enumerate(one.give(LAST)):
            if payload is not SENT:
                place(column, port, payload)
    told = [[p for c in range(columns) if c != own for p in boxes[c, own]] for own in range(columns)]
    if columns == 2:
        for (_, one), each in zip(found, told, strict=True):
            one.take_all(LAST, *each)
    else:
        added = [one.add(LAST, *each)[0] for (_, one), each in zip(found, told, strict=True)]
        for own, (_, one) in enumerate(found):
            one.take_sums(LAST, *(share for column, share in enumerate(added) if column != own))
    return early


@pytest.mark.parametrize("columns", [2, 3, 5])
@pytest.mark.parametrize("parts", [1, 3, 9])
def test_a_sum_is_that_of_the_columns_in_their_order(columns, parts):
    generator = torch.Generator().manual_seed(0)
    found = sums(columns, parts, sizes=(30, 1, 7, 12), dtypes=(torch.float32, torch.float64))
    gradients = [[1e4 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in ps] for ps, _ in found]

    def work(column, params):
        sum((p * g).sum() for p, g in zip(params, gradients[column], strict=True)).backward()
        return ()

    exchange(found, work)
    for number, first in enumerate(gradients[0]):
        expected = first.clone()
        for column in range(1, columns):
            expected += gradients[column][number]
        for params, _ in found:
            assert torch.equal(params[number].grad, expected)


@pytest.mark.parametrize("columns", [2, 3])
def test_a_part_that_changes_after_it_has_left_is_sent_again_and_waits_from_then_on(columns):
    found = sums(columns, 4)

    def twice(column, params):
        for p in reversed(params):
            (p.sum() * (column + 1)).backward()
        (params[3].sum() * 10).backward()
        params[2].grad = params[2].grad + 5.0
        return ()

    total = sum(range(1, columns + 1))
    for first in (True, False):
        early = exchange(found, twice)
        for params, _ in found:
            assert params[3].grad.tolist() == [total + 10.0 * columns] * 5
            assert params[2].grad.tolist() == [total + 5.0 * columns] * 2
            assert params[0].grad.tolist() == [float(total)] * 3
            for p in params:
                p.grad = None
        left = {port % 4 for _, port in early}
        parts = found[0][1]._parts
        changed = {part for part in left if {2, 3} & set(parts[part])}
        assert bool(changed) == first, "what changed leaves early no more"
        assert left - changed, "what did not change goes on leaving early"


@pytest.mark.parametrize("columns", [2, 3])
def test_a_message_has_one_form_whichever_parameters_lack_a_gradient(columns):
    params, one = sums(columns, 2)[0]
    forms = []
    for lacking in (set(), {0}, {1, 3}, {0, 1, 2, 3}):
        for number, p in enumerate(params):
            p.grad = None if number in lacking else torch.ones_like(p)
        tensors, structure = flatten([payload for payload in one.give(LAST) if payload is not SENT])
        forms.append((structure, [(t.dtype, t.shape) for t in tensors]))
    assert all(form == forms[0] for form in forms)


def test_hooks_are_gone_after_the_backward():
    found = sums(2, 4)

    def fails(column, params):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        exchange(found, fails)
    assert all(not p._post_accumulate_grad_hooks for params, _ in found for p in params[1:])


def test_schedules_tell_what_completes_an_update():
    for name, kind in {"1f1b": "B", "zb-h1": "W", "pipedream": "B", "dtrp": "B", "petra": "B"}.items():
        schedule = Replicated(get(name).schedule(3), 2)
        assert [schedule.completes(Kind.U, station) for station in range(3)] == [kind] * 3, name


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dtrp", "dgl", "auglocal", "auxnet"])
def test_what_is_simulated_is_what_is_trained(name, replicas):
    model = tanh_net(4)
    layers = [
        LayerCost(str(n), 1, 1, 1, activation_bytes=240, weight_bytes=sum(p.nbytes for p in block.parameters()))
        for n, block in enumerate(model)
    ]
    with in_parts():
        simulated = simulate_method(name, layers, 2 * replicas, split=["2"], replicas=replicas)
        run = unlatch.parallelize(
            model,
            name,
            stages=2,
            split=["2"],
            replicas=replicas,
            loss_fn=mse_loss,
            optimizer=plain_sgd,
            sample=vectors(1)[0],
        )
    schedule = simulated.costed.schedule
    assert schedule == run.schedule
    assert schedule.entries == run.schedule.entries
    sent = {
        route: simulated.costed.workload.bytes(route)
        for entry in schedule.entries
        if entry.per == "update" and entry.kind not in {own.kind for own in schedule.base.entries}
        for route in entry.outgoing
    }
    # Of shares, what leaves to be summed and the sums. How large networks beside the stages are is not known.
    whole = sum(layer.weight_bytes for layer in layers) * replicas
    assert sum(sent.values()) == pytest.approx(whole if replicas == 2 else whole * 4 / 3)


def test_parts_are_few_and_not_small():
    assert parts_of(0) == parts_of(2**20 - 1) == 1
    assert parts_of(2**20) == 2
    assert max(parts_of(2**n) for n in range(28)) == 8
    assert parts_of(2**40) == -(-(2**40) // (25 * 2**20))
