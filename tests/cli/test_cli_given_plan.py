"""`unlatch train --plan`: training follows what `unlatch plan` printed, and says why where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def trained(unlatch, *flags: object) -> dict:
    result = unlatch("train", "conf.toml", *flags, "--processes", 1, "--out", "run", "--overwrite", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def plan_of_conf(unlatch, conf):
    """A plan of the small model by counted costs, which are the same every time."""

    def make(*flags: object) -> dict:
        result = unlatch("plan", conf, "--cost-model", "mac", *flags, "--json", "-o", "plan.json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return make


@pytest.mark.parametrize(
    "flags",
    [
        ("--method", "pipedream", "--devices", 3),
        ("--method", "pipedream", "--devices", 3, "--bandwidth", 1e6),
        ("--method", "layerpipe", "--devices", 3),
        ("--method", "layerpipe", "--devices", 20),
        ("--method", "layerpipe", "--devices", 5, "--mode", "atomic"),
        ("--method", "layerpipe", "--devices", 3, "--mode", "factor"),
        ("--method", "layerpipe", "--devices", 4, "--bandwidth", 1e3, "--latency", 10),
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_train_refused_plans_that_plan_offers(unlatch, plan_of_conf, flags):
    plan = plan_of_conf(*flags)
    summary = trained(unlatch, "--plan", "plan.json")
    assert summary["method"] == plan["method"]
    settings = Path("run/config.toml").read_text()
    assert f"stages = {plan['busy_devices']}\n" in settings


@pytest.mark.parametrize("devices", [1, 20])
def test_train_refused_plans_of_auto(unlatch, plan_of_conf, devices):
    """On as many devices as each method uses, of which there may be fewer than were given."""
    plan = plan_of_conf("--devices", devices)
    assert trained(unlatch, "--plan", "plan.json")["method"] == plan["ranking"][0]["method"]
    for name in ("layerpipe", "zb-h1", "dgl"):
        stages = next(one["stages"] for one in plan["ranking"] if one["method"] == name)
        summary = trained(unlatch, "--plan", "plan.json", "--method", name)
        assert summary["method"] == name
        assert f"stages = {stages}\n" in Path("run/config.toml").read_text()


def test_a_plan_beats_the_stages_processes_and_split_of_the_file(unlatch, plan_of_conf, conf):
    conf.write_text(conf.read_text() + 'stages = 3\nprocesses = 3\nsplit = ["layers.1", "layers.2"]\n')
    plan_of_conf("--method", "pipedream", "--devices", 2)
    result = unlatch("train", conf, "--plan", "plan.json", "--out", "run", "--processes", 1)
    assert result.exit_code == 0, result.output
    settings = Path("run/config.toml").read_text()
    assert "stages = 2\n" in settings
    refused = unlatch("train", conf, "--plan", "plan.json", "--stages", 3)
    assert refused.exit_code == 2
    assert "--stages 3 contradicts the plan plan.json, which uses 2" in refused.stderr


def test_training_follows_the_tasks_of_the_plan(unlatch, plan_of_conf):
    plan = plan_of_conf("--method", "layerpipe", "--devices", 3)
    shown = unlatch("train", "conf.toml", "--plan", "plan.json", "--processes", 1, "--out", "run").stdout
    assert "as plan.json says" in shown
    delays = [int(line.rsplit(" ", 1)[1]) for line in shown.splitlines() if line.startswith("layer ")]
    # Neighbours on one device are one layer to training.
    assert [d for n, d in enumerate(plan["delays"]) if n == 0 or d != plan["delays"][n - 1]] == list(
        dict.fromkeys(delays)
    )
    again = unlatch("train", "--resume", "run", "--epochs", 2)
    assert again.exit_code == 0, again.output
    assert "as plan.json says" in again.stdout


def test_a_plan_of_a_file_with_the_blocks_of_the_model(unlatch, conf, answer):
    layers = [{"name": f"layers.{n}", "F": t, "D": t, "G": t} for n, t in enumerate((1, 2, 4, 3))]
    answer(layers, 2, "--method", "layerpipe", "-o", "plan.json")
    assert trained(unlatch, "--plan", "plan.json")["method"] == "layerpipe"


# --------------------------------------------------------------------- bad plans


def damage(**changes: object):
    return lambda plan: {**plan, **changes}


DAMAGED = {
    "another model": (lambda p: p | {"blocks": [f"x{n}" for n, _ in enumerate(p["blocks"])]}, ["another model"]),
    "a lost task": (lambda p: p | {"tasks": p["tasks"][1:]}, ["incomplete", "F of layer 0"]),
    "no tasks": (damage(tasks=[]), ["incomplete"]),
    "tasks that are none": (damage(tasks=[3]), ["damaged: tasks.0: expected an object, got 3 (whole number)"]),
    "a task of a strange kind": (
        lambda p: p | {"tasks": [p["tasks"][0] | {"task": "Q"}]},
        ["tasks.0.task: expected one of 'F', 'D', 'G' or 'H', got 'Q'"],
    ),
    "a task of nothing": (
        lambda p: p | {"tasks": [{"layer": 0, "device": 0}]},
        ["tasks.0.task: missing"],
    ),
    "a task of a strange layer": (
        lambda p: p | {"tasks": [*p["tasks"], p["tasks"][0] | {"layer": 99}]},
        ["F of layer 99", "there are"],
    ),
    "a device of halves": (
        lambda p: p | {"tasks": [p["tasks"][0] | {"device": 0.5}]},
        ["tasks.0.device: expected a whole number, got 0.5"],
    ),
    "a fraction of nothing": (
        lambda p: p | {"tasks": [p["tasks"][0] | {"fraction": 0}]},
        ["tasks.0.fraction: expected a number above 0", "got 0"],
    ),
    "more than a task": (
        lambda p: p | {"tasks": [p["tasks"][0] | {"fraction": 1.5}]},
        ["tasks.0.fraction: expected at most 1", "got 1.5"],
    ),
    "half of a task": (
        lambda p: p | {"tasks": [t | {"fraction": t["fraction"] / 2} for t in p["tasks"]]},
        ["shares of F of layer 0", "add up to 1, got 0.5 on 0"],
    ),
    "a task twice": (lambda p: p | {"tasks": [*p["tasks"], p["tasks"][0]]}, ["shares of F of layer 0"]),
    "a mode without tasks": (damage(options={"mode": "stages"}), ["mode must be one of divisible, atomic, factor"]),
    "loads that are none": (damage(loads=["x", 1, 1]), ["loads.0: expected a number, got 'x'"]),
    "loads below nothing": (damage(loads=[1, -1, 1]), ["loads.1: expected at least 0.0, got -1"]),
    "devices in disorder": (
        lambda p: p | {"tasks": [t | {"device": 2 - t["device"]} for t in p["tasks"]]},
        ["growing devices"],
    ),
    "too few loads": (damage(loads=[1]), ["loads of 1 devices"]),
    "starts in disorder": (damage(starts=[0, 2, 1]), ["starts: expected growing positions"]),
    "no method": (damage(method=None), ["expected what `unlatch plan --json` prints", "method None"]),
    "an unknown method": (damage(method="layerpip"), ["there is no method 'layerpip'", "Did you mean 'layerpipe'"]),
    "an unknown option": (lambda p: p | {"options": p["options"] | {"speed": 3}}, ["speed"]),
    "a list": (lambda p: [p], ["expected what `unlatch plan --json` prints", "list"]),
    "an unknown mode": (damage(options={"mode": "sideways"}), ["mode must be one of", "sideways"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_plan_is_named(unlatch, plan_of_conf, case):
    change, phrases = DAMAGED[case]
    Path("damaged.json").write_text(json.dumps(change(plan_of_conf("--method", "layerpipe", "--devices", 3))))
    result = unlatch("train", "conf.toml", "--plan", "damaged.json")
    assert result.exit_code == 2, result.output
    assert "damaged.json" in result.stderr
    assert "conf.toml" not in result.stderr
    for phrase in phrases:
        assert phrase in result.stderr
    assert "Traceback" not in result.output


def test_a_truncated_plan_is_named(unlatch, plan_of_conf):
    plan_of_conf("--method", "pipedream")
    whole = Path("plan.json").read_text()
    Path("half.json").write_text(whole[: len(whole) // 2])
    result = unlatch("train", "conf.toml", "--plan", "half.json")
    assert (result.exit_code, "the plan file half.json is not JSON" in result.stderr) == (2, True)
    for name, content in (("empty.json", ""), ("deep.json", "[" * 100_000)):
        Path(name).write_text(content)
        result = unlatch("train", "conf.toml", "--plan", name)
        assert (result.exit_code, f"the plan file {name}" in result.stderr) == (2, True), result.output


def test_a_straight_plan_of_another_model_is_named(unlatch, plan_of_conf):
    plan = plan_of_conf("--method", "pipedream")
    Path("other.json").write_text(json.dumps(plan | {"blocks": [f"body.{n}" for n in range(9)], "starts": [0, 3]}))
    result = unlatch("train", "conf.toml", "--plan", "other.json")
    assert result.exit_code == 2
    assert "the plan file other.json does not suit this model: no block is called 'body.3'" in result.stderr


def test_what_is_planned_with_replicas_is_trained_with_them(unlatch, plan_of_conf):
    plan = plan_of_conf("--method", "pipedream", "--replicate", "--devices", 3)
    assert plan["replicas"] == [3]
    trained(unlatch, "--plan", "plan.json")
    assert "stages = 1\nprocesses = 1\nreplicas = 3\n" in Path("run/config.toml").read_text()
    refused = unlatch("train", "conf.toml", "--plan", "plan.json", "--replicas", 2)
    assert (refused.exit_code, "--replicas 2 contradicts the plan" in refused.stderr) == (2, True), refused.output
    plan_of_conf("--method", "pipedream", "--devices", 2)
    trained(unlatch, "--plan", "plan.json", "--replicas", 2)
    assert "stages = 2\nprocesses = 1\nreplicas = 2\n" in Path("run/config.toml").read_text()


def test_plans_of_unequal_replicas_are_refused(unlatch, plan_of_conf):
    plan = plan_of_conf("--method", "pipedream", "--devices", 2)
    Path("plan.json").write_text(json.dumps({**plan, "replicas": [2, 1], "loads": [1, 1, 2]}))
    refused = unlatch("train", "conf.toml", "--plan", "plan.json")
    assert refused.exit_code == 2, refused.output
    assert "for analysis only: stages have different numbers of devices" in refused.stderr


def test_plans_that_training_cannot_follow_say_so(unlatch, plan_of_conf):
    for flags, reason in (
        (("--method", "layerpipe", "--placement", "list", "--mode", "atomic"), "plan with --placement row"),
    ):
        plan = plan_of_conf(*flags, "--devices", 3)
        assert reason in plan["analysis"]
        refused = unlatch("train", "conf.toml", "--plan", "plan.json")
        assert (refused.exit_code, refused.stderr.count(plan["analysis"])) == (2, 1), refused.output
        assert "the plan file plan.json is for analysis only" in refused.stderr
    plan_of_conf("--devices", 2)
    wrong = unlatch("train", "conf.toml", "--plan", "plan.json", "--method", "pipedraem")
    assert "does not rank 'pipedraem'. Did you mean 'pipedream'" in wrong.stderr
    plan_of_conf("--method", "pipedream")
    assert (
        "is for pipedream, not for dtr"
        in unlatch("train", "conf.toml", "--plan", "plan.json", "--method", "dtr").stderr
    )
    unlatch("train", "conf.toml", "--out", "run")
    assert "--resume keeps its plan" in unlatch("train", "--resume", "run", "--plan", "plan.json").stderr
