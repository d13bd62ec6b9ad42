"""What `messages=` does to a run in one process: what is rounded, what is not, and who is told."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import message_jobs
import unlatch
from order_jobs import begun, data
from rank_jobs import copied_state, plain_sgd
from rev_nets import regression, rev_run
from tied_nets import TiedLM, padded, token_sum
from unlatch.errors import ConfigError, NonFinite
from unlatch.nn.tree import leaves

FORMATS = ("bf16", "int8")


def payloads(run: unlatch.Run) -> dict[tuple[str, int], list]:
    """Everything that the run sends from now on, by name and receiver."""
    seen: dict[tuple[str, int], list] = {}
    mail = run._engine.mail
    send = mail.send

    def noted(message):
        seen.setdefault((message.kind, message.stage), []).append(message.payload)
        send(message)

    mail.send = noted
    return seen


def dtypes(payload) -> set[torch.dtype]:
    return {t.dtype for t in leaves(payload)}


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match='messages must be "exact", "bf16" or "int8", got \'fp8\''):
        message_jobs.wide_run("fp8")


def test_exact_is_what_it_was():
    run = message_jobs.wide_run("exact")
    assert run._engine.compression is None
    seen = payloads(run)
    run.step(torch.ones(64, 8), torch.zeros(64, 4))
    assert dtypes(seen["forward", 1]) == {torch.float32}


@pytest.mark.parametrize(("messages", "dtype"), [("bf16", torch.bfloat16), ("int8", torch.int8)])
def test_states_and_gradients_are_rounded_and_targets_are_not(messages, dtype):
    run = message_jobs.wide_run(messages)
    seen = payloads(run)
    target = torch.randn(64, 4)
    for _ in range(3):
        run.step(torch.ones(64, 8), target)
    run.flush()
    for state, sent in seen["forward", 1]:
        assert leaves(state)[0].dtype == dtype
        assert torch.equal(sent, target)
    assert all(leaves(gradients)[0].dtype == dtype for gradients, _ in seen["backward", 0])


@pytest.mark.parametrize("messages", FORMATS)
def test_one_stage_sends_nothing_and_is_what_it_was(messages):
    outcomes = []
    for chosen in ("exact", messages):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        settings = {"loss_fn": mse_loss, "optimizer": plain_sgd, "messages": chosen}
        run = unlatch.parallelize(model, "pipedream", stages=1, **settings)
        losses = [run.step(x, y).loss for x, y in data()]
        outcomes.append((losses, copied_state(model)))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(t, outcomes[1][1][name]) for name, t in outcomes[0][1].items())


def test_weights_that_stages_share_stay_exact():
    torch.manual_seed(0)
    run = unlatch.parallelize(
        TiedLM(),
        "1f1b",
        stages=3,
        split=["layers.0", "head"],
        loss_fn=token_sum,
        optimizer=plain_sgd,
        messages="int8",
    )
    seen = payloads(run)
    for x, y in padded(2, 6):
        run.step(x, y)
    shared = {name: t for name, t in run.module().state_dict().items() if name == "embed.weight"}
    (shape,) = {t.shape for t in shared.values()}
    for (name, _), sent in seen.items():
        if name in ("forward", "backward"):
            tensors = [t for part in sent for t in leaves(part[0])]
            assert {t.dtype for t in tensors if t.shape == shape} == {torch.float32}
            assert torch.int8 in {t.dtype for t in tensors}


def test_evaluation_is_exact():
    run = message_jobs.wide_run("int8")
    seen = payloads(run)
    run.evaluate([(torch.ones(4, 8), torch.zeros(4, 4))])
    assert dtypes(seen["evaluate", 1]) == {torch.float32}


def test_stages_that_compute_their_input_back_send_their_output_as_it_is(caplog):
    with caplog.at_level(logging.WARNING, "unlatch"):
        run = rev_run("SRRH", "petra", partial(torch.optim.SGD, lr=0.01), messages="int8")
    assert any(r.message.startswith('messages="int8": petra computes inputs back') for r in caplog.records)
    assert any("petra computes inputs back" in note for note in run.notes)
    seen = payloads(run)
    for x, y in regression(8, size=20):
        run.step(x, y)
    run.flush()
    # Stage 0 keeps its input and rounds; 1 and 2 are couplings.
    assert torch.int8 in dtypes(seen["forward", 1])
    assert dtypes(seen["forward", 2]) == dtypes(seen["forward", 3]) == {torch.float64}
    for gradients, inputs in seen["backward", 1]:
        assert torch.int8 in dtypes(gradients)
        assert dtypes(inputs) == {torch.float64}
    plain = rev_run("SRRH", "dsp", partial(torch.optim.SGD, lr=0.01), messages="int8")
    assert not any("computes inputs back" in note for note in plain.notes)


def test_reconstruction_is_as_good_as_with_exact_messages():
    worst = {}
    for messages in ("exact", "int8"):
        run = rev_run("SRRH", "petra", partial(torch.optim.SGD, lr=0.0), messages=messages)
        for x, y in regression(8, size=20):
            run.step(x, y)
        run.flush()
        worst[messages] = max(s.reconstruction_error or 0.0 for s in run.statistics())
    # With weights that do not move only rounding of float64 is left.
    assert worst["int8"] < 1e-12
    assert worst["exact"] < 1e-12


def _feed(run: unlatch.Run, x: torch.Tensor, count: int) -> None:
    for _ in range(count):
        run.step(x, torch.zeros(64, 4))


@pytest.mark.parametrize("messages", FORMATS)
def test_what_is_not_finite_is_found(messages):
    run = message_jobs.wide_run(messages)
    x = torch.ones(64, 8)
    run.step(x, torch.zeros(64, 4))
    x[3, 2] = float("nan")
    with pytest.raises(NonFinite):
        _feed(run, x, 4)


def test_a_batch_that_is_skipped_leaves_no_trace_in_what_is_owed():
    outcomes = []
    for spoilt in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6))
        run = unlatch.parallelize(
            model,
            "pipedream",
            stages=2,
            split=["2"],
            loss_fn=mse_loss,
            optimizer=plain_sgd,
            nonfinite="skip",
            messages="int8",
        )
        for number, (x, y) in enumerate(data()):
            if spoilt and number == 2:
                run.step(x * float("nan"), y)
            run.step(x, y)
        run.flush()
        outcomes.append(copied_state(model))
    assert all(torch.equal(t, outcomes[1][name]) for name, t in outcomes[0].items())


def test_a_checkpoint_of_another_format_is_finished_in_its_own(tmp_path):
    """What is under way was rounded by the run that it is from; weights are the same whatever comes after."""
    run = begun("pipedream", messages="int8")
    for x, y in data():
        run.step(x, y)
    run.save(tmp_path / "checkpoint")
    run.flush()
    other = begun("pipedream", messages="exact")
    other.load(tmp_path / "checkpoint")
    assert all(torch.equal(a, b) for a, b in zip(_weights(run), _weights(other), strict=True))


def _weights(run: unlatch.Run) -> list[torch.Tensor]:
    return list(run.module().state_dict().values())


@pytest.mark.parametrize(("method", "messages"), [("1f1b", "int8"), ("pipedream", "int8"), ("pipedream", "bf16")])
def test_digits_are_learned(method, messages):
    torch.manual_seed(0)
    train, test = unlatch.data.load("digits")
    x, y = train.x.flatten(1), train.y
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))
    run = unlatch.parallelize(
        model,
        method,
        stages=3,
        split=["2", "4"],
        loss_fn=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        messages=messages,
    )
    for _ in range(4):
        for part in torch.randperm(len(x)).split(64):
            run.step(x[part], y[part])
    run.flush()
    assert run.evaluate([(test.x.flatten(1), test.y)])["accuracy"] > 0.9
