"""`unlatch check`: what holds is called ok, what does not is called out, and what does not apply says why."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from unlatch import methods
from unlatch.cli import checks
from unlatch.cli.checks import equality, faults, gradients, soundness, trajectory
from unlatch.cli.checks.finding import find_out
from unlatch.cli.checks.trial import Trial
from unlatch.cli.prepare import prepare
from unlatch.cli.settings import read_settings
from unlatch.errors import PeerLost
from unlatch.reference import recursion
from unlatch.transport.lanes import BACKENDS, Backend

CHECKS = {
    "one stage": equality.one_stage,
    "zero": gradients.standing_still,
    "exact": gradients.exact_method,
    "definition": trajectory.definition,
    "inverses": soundness.inverses,
}


def trial(model, method, *overrides, stages=2):
    given = [f"model.name={model}", "data.batch_size=16", *overrides]
    return Trial.of(prepare(read_settings(None, given, method=method, stages=stages)[0]))


def findings(of: Trial) -> dict[str, checks.Finding]:
    return {name: find_out(name, partial(look, of)) for name, look in CHECKS.items()}


@pytest.mark.parametrize("method", methods.names())
def test_every_method_keeps_its_promises(method):
    # This network is not reversible.
    told = ["method.store=[0, 1, 2]"] if methods.get(method).inverts else []
    found = findings(trial("mlp", method, *told, stages=4))
    assert {one.verdict for one in found.values()} <= {"ok", "not applicable"}, found
    assert found["one stage"].verdict == "ok"


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "pipedream", "fdg", "dtrp"])
def test_convolutions_and_batch_norm(method):
    found = findings(trial("resnet8", method, "run.clip_grad_norm=0.5"))
    assert {one.verdict for one in found.values()} <= {"ok", "not applicable"}, found
    delayed = method in ("pipedream", "fdg", "dtrp")
    assert found["definition"].verdict == ("ok" if delayed else "not applicable")


def test_reversible_blocks_are_inverted():
    found = findings(trial("revnet8", "petra"))
    assert found["inverses"].verdict == "ok"
    assert found["zero"].verdict == "ok", found["zero"]
    plain = trial("mlp", "petra", "method.store=[0]")
    assert "none of the 4 blocks" in find_out("x", partial(soundness.inverses, plain)).text


def test_other_optimizers_and_precision():
    found = findings(trial("mlp", "dtr", "optimizer.name=AdamW", "run.precision=bf16"))
    assert found["one stage"].verdict == "ok"
    assert found["definition"].verdict == "not applicable"
    assert "AdamW" in found["definition"].text


def test_a_wrong_definition_is_noticed(monkeypatch):
    def off(stages, micros, loss_fn, sgd, *args, **options):
        return recursion(stages, micros, loss_fn, replace(sgd, lr=0.11), *args, **options)

    monkeypatch.setattr(trajectory, "recursion", off)
    found = find_out("definition", partial(trajectory.definition, trial("mlp", "dtr")))
    assert found.verdict == "differs"
    assert "weights differ by" in found.text


def test_a_wrong_gradient_is_noticed(monkeypatch):
    whole = Trial.micros
    monkeypatch.setattr(Trial, "micros", lambda of, batches: [(1.001 * x, y) for x, y in whole(of, batches)])
    assert find_out("zero", partial(gradients.standing_still, trial("mlp", "fdg"))).verdict == "differs"


def test_one_bit_off_the_plain_loop_is_noticed(monkeypatch):
    train = Trial.train

    def off(of, *args, **changes):
        losses, state = train(of, *args, **changes)
        name = next(iter(state))
        return losses, state | {name: torch.nextafter(state[name], torch.tensor(9.0))}

    monkeypatch.setattr(Trial, "train", off)
    found = find_out("one stage", partial(equality.one_stage, trial("mlp", "bp")))
    assert found.verdict == "differs"


MODELS = """
from torch import nn

class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))

def centred():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Centred(16, 10))

def model():
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5)), nn.Linear(16, 10))

def one_norm():
    shared = nn.BatchNorm1d(64, affine=False)
    return nn.Sequential(nn.Flatten(), shared, nn.Sequential(nn.ReLU(), shared), nn.Linear(64, 10))
"""


@pytest.fixture
def user_models(tmp_path, monkeypatch):
    (tmp_path / "checked_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "checked_models", raising=False)


def test_dropout_replays(user_models):
    found = findings(trial("checked_models:model", "dtr"))
    assert [found[name].verdict for name in ("one stage", "zero", "definition")] == ["ok"] * 3, found
    found = findings(trial("checked_models:model", "gpipe"))
    assert "dropout" in found["exact"].text


def test_a_method_that_is_not_exact_is_noticed(user_models):
    """Each sample depends on its micro-batch, in a layer that nothing is known of."""
    found = find_out("exact", partial(gradients.exact_method, trial("checked_models:centred", "gpipe")))
    assert found.verdict == "differs", found


def test_the_command(unlatch, conf):
    result = unlatch("check", conf, "--method", "dtr", "--stages", 2, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True
    verdicts = {one["check"]: one["verdict"] for one in report["findings"]}
    held = {"machine", "chain", "one stage", "zero learning rate", "definition", "loopback", "two processes"}
    assert {name for name, verdict in verdicts.items() if verdict == "ok"} == held


def test_the_command_fails_where_the_model_cannot_be_cut(unlatch, conf, user_models):
    conf.write_text(conf.read_text().replace('"mlp"', '"checked_models:one_norm"') + 'stages = 2\nsplit = ["2"]\n')
    result = unlatch("check", conf)
    assert result.exit_code == 1
    assert "differs        chain" in result.stdout
    assert "shared by block" in result.stdout


def test_faults_end_as_they_should_or_are_called_out(unlatch, monkeypatch):
    """Two of them, and one that is expected to end otherwise than it does."""
    paused, *_ = faults.ordeals()
    failed = next(one for one in faults.ordeals() if one.name == "user code")
    wrong = replace(failed, name="wrong", expected=PeerLost)
    monkeypatch.setattr(faults, "ordeals", lambda: [paused, failed])
    result = unlatch("check", "--faults")
    assert result.exit_code == 0, result.output
    assert "every fault ended as it should" in result.output
    assert "StageFailed: stage 0 failed in the forward of batch 3" in result.output
    monkeypatch.setattr(faults, "ordeals", lambda: [wrong])
    result = unlatch("check", "--faults", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert not told["ok"]
    assert [one["fault"] for one in told["faults"]] == ["wrong"]
    assert 0 <= told["faults"][0]["seconds"] < 30


def test_faults_take_no_settings(unlatch, conf):
    result = unlatch("check", conf, "--faults")
    assert result.exit_code == 2
    assert "leave out CONF.toml" in result.output


def test_a_device_with_its_speed_and_a_report(unlatch, monkeypatch):
    """What is found on a device, in a form for an issue; here the device is the CPU and nothing is sent."""
    monkeypatch.setattr(checks, "loopback", lambda ranks: "not tried")
    monkeypatch.setattr(checks, "two_processes", lambda trial, ranks: "not tried")
    monkeypatch.setattr(checks, "speed", lambda trial, ranks: checks.device.speed(trial, None))
    shown = ["--set", "model.name=mlp", "--set", "run.stages=1", "--set", "method.name=bp"]
    result = unlatch("check", "--device", "cpu", *shown)
    assert result.exit_code == 0, result.output
    found = result.stdout[result.stdout.index("### unlatch check --device cpu") :].splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in found if line.startswith("| ")}
    assert "torch finds no accelerator" in rows["device"]
    assert "tensors are on the host already" in rows["transfer"]
    assert "bit for bit" in rows["one stage"]
    assert "nobody is known here who carries tensors from one cpu device to another" in rows["nccl"]
    assert "plain PyTorch" in rows["speed"]
    assert "samples/s, bp on" in rows["speed"]
    assert any(line.startswith("unlatch ") and "torch" in line for line in found)


def test_nccl_is_tried_where_there_is_a_device_for_it(monkeypatch):
    """As far as that goes without one: the option reaches the ranks, and both ways are timed."""
    monkeypatch.setitem(BACKENDS, "nccl", Backend("gloo", "cpu"))
    asked = []

    class Here:
        def run(self, job, *args, **options):
            asked.append(args[-1])
            return [job(*args)] * 2

    one = trial("mlp", "dtr")
    found = find_out("nccl", partial(checks.device.past_the_host, one, Here()))
    assert found.verdict == "ok", found
    assert found.text.endswith("in one process and in two over nccl: the same weights, buffers and losses, bit for bit")
    assert asked == ["nccl"]
    text = checks.device.speed(one, Here())
    assert set(asked[1:]) == {"auto", "nccl"}
    assert "two processes over nccl " in text
    monkeypatch.setitem(BACKENDS, "nccl", Backend("nccl", "cpu"))
    refused = find_out("nccl", partial(checks.device.past_the_host, one, Here()))
    assert refused.verdict == "differs"
    assert "was built without nccl" in refused.text
