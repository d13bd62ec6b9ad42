"""`unlatch plan`: the hand-worked tables through the command line, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from unlatch.advise.advice import ELSEWHERE
from unlatch.cli.cost_flags import CostSource
from unlatch.cli.planning import layer_costs

#: LayerPipe divisible, LayerPipe atomic, straight PipeDream: by number of devices.
INTERVALS = {
    "unit": {
        1: (11, 11, 11),
        2: (5.5, 6, 6),
        3: (4, 4, 5),
        4: (2.75, 3, 3),
        5: (2.5, 3, 3),
        6: (2, 2, 3),
        8: (1.5, 2, 3),
        11: (1, 1, 3),
    },
    "mixed": {
        1: (29, 29, 29),
        2: (16, 16, 20),
        3: (10, 12, 12),
        4: (8, 8, 12),
        5: (6.5, 7, 12),
        6: (6, 6, 12),
        8: (4, 4, 12),
        11: (4, 4, 12),
    },
}
TIMES = {"unit": (1, 1, 1, 1), "mixed": (1, 2, 4, 3)}
KEYS = {"initiation_interval", "loads", "blocks", "starts", "delays", "utilisation", "communication_bytes"}


def chain(*times: float, **other: object) -> list[dict[str, object]]:
    return [{"name": f"l{n}", "F": t, "D": t, "G": t, **other} for n, t in enumerate(times)]


# ------------------------------------------------------------------- tables


@pytest.mark.parametrize("name", INTERVALS)
def test_intervals_of_both_chains(answer, name):
    for devices, (divisible, atomic, straight) in INTERVALS[name].items():
        for mode, expected in (("divisible", divisible), ("atomic", atomic)):
            found = answer(chain(*TIMES[name]), devices, "--method", "layerpipe", "--mode", mode)
            assert found["initiation_interval"] == expected, (mode, devices)
            assert found.keys() >= {*KEYS, "tasks"}
            assert len(found["loads"]) == devices
            assert max(found["loads"]) == expected
            assert sum(found["loads"]) == pytest.approx(3 * sum(TIMES[name]) - TIMES[name][0])
            assert found["utilisation"] == pytest.approx(sum(found["loads"]) / devices / expected)
            assert {"task", "layer", "device", "fraction", "slot"} <= found["tasks"][0].keys()
        found = answer(chain(*TIMES[name]), devices, "--method", "pipedream")
        assert found["initiation_interval"] == straight
        assert found.keys() >= KEYS


def mapping(found: dict) -> list[list[str]]:
    """What each device does, as `task + layer from 1 on [x fraction] @ slot`."""
    rows: list[list[str]] = [[] for _ in found["loads"]]
    for task in found["tasks"]:
        share = "" if task["fraction"] == 1 else f"*{task['fraction']}"
        rows[task["device"]].append(f"{task['task']}{task['layer'] + 1}{share}@{task['slot']}")
    return [sorted(row) for row in rows]


MAPPINGS = {
    2: (
        ["F1@0 G1@2 D2@2 F2@0 G2@2 D3*0.5@2", "D3*0.5@1 F3@1 G3@1 D4@1 F4@1 G4@1"],
        [2, 2, 0, 0],
        1,
    ),
    4: (
        ["F1@0 G1@6 D2*0.75@6", "D2*0.25@5 F2@1 G2@5 D3*0.5@5", "D3*0.5@4 F3@2 G3@4 D4*0.25@4", "D4*0.75@3 F4@3 G4@3"],
        [6, 4, 2, 0],
        1,
    ),
}


@pytest.mark.parametrize("devices", MAPPINGS)
def test_mappings_slots_and_delays_of_equal_layers(answer, devices):
    rows, delays, utilisation = MAPPINGS[devices]
    found = answer(chain(1, 1, 1, 1), devices, "--method", "layerpipe")
    assert mapping(found) == [sorted(row.split()) for row in rows]
    assert found["delays"] == delays
    assert found["utilisation"] == utilisation


def test_the_stash_of_four_equal_layers(answer):
    assert answer(chain(1, 1, 1, 1), 4, "--method", "layerpipe")["weight_stash"] == [0, 5, 3, 1]


def test_six_processors_with_whole_tasks(answer):
    found = answer(chain(1, 1, 1, 1), 6, "--method", "layerpipe", "--mode", "atomic")
    tasks = [sorted(task.split("@")[0] for task in row) for row in mapping(found)]
    assert tasks == [["F1", "G1"], ["D2", "F2"], ["D3", "G2"], ["F3", "G3"], ["D4", "F4"], ["G4"]]
    assert found["delays"] == [6, 3, 2, 1]


def test_three_processors_take_four_units(answer):
    found = answer(chain(1, 1, 1, 1), 3, "--method", "layerpipe", "--mode", "atomic")
    assert found["initiation_interval"] == 4
    assert found["utilisation"] == pytest.approx(11 / 12)


def test_pipedream_stages_loads_and_versions(answer):
    found = answer(chain(1, 1, 1, 1), 3, "--method", "pipedream")
    assert (found["blocks"], found["starts"]) == (["l0", "l1", "l2", "l3"], [0, 2, 3])
    assert "replicas" not in found
    assert (found["loads"], found["utilisation"]) == ([5, 3, 3], pytest.approx(11 / 15))
    assert (found["versions"], found["delays"]) == ([3, 2, 1], [2, 2, 1, 0])
    found = answer(chain(1, 1, 1, 1), 4, "--method", "pipedream")
    assert (found["loads"], found["utilisation"]) == ([2, 3, 3, 3], pytest.approx(11 / 12))


def test_pipedream_with_replicas_is_data_parallel_where_messages_are_free(answer):
    found = answer(chain(1, 1, 1, 1), 3, "--method", "pipedream", "--replicate")
    assert (found["starts"], found["replicas"]) == ([0], [3])
    assert found["initiation_interval"] == pytest.approx(11 / 3)


def test_pipedream_without_replicas_ignored_the_bandwidth(answer):
    layers = chain(1, 1, 1, 1, activation_bytes=100)
    layers[1]["activation_bytes"] = 1
    found = answer(layers, 4, "--method", "pipedream", "--bandwidth", 1)
    assert (found["starts"], found["initiation_interval"]) == ([0, 2], 6)
    found = answer(chain(1, 1, 1, 1, activation_bytes=100), 4, "--method", "pipedream", "--bandwidth", 1)
    assert (found["starts"], found["initiation_interval"], found["busy_devices"]) == ([0], 11, 1)


def test_factor_split_moves_the_elementwise_part_down(answer):
    layers = chain(4, 4, hadamard=1)
    found = answer(layers, 2, "--method", "layerpipe", "--mode", "factor")
    assert [task["layer"] for task in found["tasks"] if task["task"] == "H"] == [0]
    assert sum(found["loads"]) == 20
    assert (
        found["initiation_interval"]
        <= answer(layers, 2, "--method", "layerpipe", "--mode", "atomic")["initiation_interval"]
    )


def test_placements_anywhere(answer):
    for placement in ("list", "exact"):
        flags = ("--method", "layerpipe", "--mode", "atomic", "--placement", placement)
        found = answer(chain(1, 2, 4, 3), 3, *flags)
        assert found["initiation_interval"] >= 10
        assert found["contiguous"] is False
    assert (found["initiation_interval"], found["proven"]) == (10, True)


def test_layers_of_no_cost_and_of_extreme_cost(answer):
    zero = {"name": "z", "F": 0, "D": 0, "G": 0}
    found = answer([*chain(1, 1), zero], 4, "--method", "layerpipe")
    assert found["initiation_interval"] == 1.5
    for unit in (1e-100, 3e99):
        for method in ("layerpipe", "pipedream"):
            found = answer(chain(unit, unit, unit, activation_bytes=unit, weight_bytes=unit), 2, "--method", method)
            assert math.isfinite(found["initiation_interval"])
            assert sum(found["loads"]) == pytest.approx(8 * unit)
        for links in (("--bandwidth", 2), ("--bandwidth", 1e-100, "--latency", 1e100)):
            found = answer(chain(unit, unit, unit, activation_bytes=unit, weight_bytes=unit), 2, *links)
            assert all(0 < one["time_per_batch"] < math.inf for one in found["ranking"])


def test_more_processors_than_work(answer, unlatch):
    found = answer(chain(1), 5, "--method", "layerpipe")
    assert (found["busy_devices"], found["loads"]) == (2, [1, 1, 0, 0, 0])
    table = unlatch("plan", "--costs", "layers.json", "--devices", 5, "--method", "layerpipe").stdout
    assert "3 of 5 devices would gain nothing and stay idle" in table


# -------------------------------------------------------------------- tables for people


def test_table_names_links_and_what_training_does_not_follow(unlatch, costs):
    path = costs(chain(1, 1, 1, 1, activation_bytes=10))
    for method in ("auto", "layerpipe", "pipedream"):
        table = unlatch("plan", "--costs", path, "--method", method, "--bandwidth", 100).stdout
        assert "training uses the links of its machine" in table, method
        assert "training uses" not in unlatch("plan", "--costs", path, "--method", method).stdout
    lists = ("--method", "layerpipe", "--placement", "list", "--devices", 3)
    table = unlatch("plan", "--costs", path, *lists).stdout
    assert "for analysis only" in table
    assert "follows only plans in a row" in table
    replicas = ("--method", "pipedream", "--replicate", "--devices", 3)
    assert "for analysis only" not in unlatch("plan", "--costs", path, *replicas).stdout
    # Weights that cost too much to exchange are on one device, the rest is replicated.
    heavy = costs([*chain(2, 2, activation_bytes=1), {"name": "l2", "F": 1, "D": 1, "G": 1, "weight_bytes": 1000}])
    table = unlatch("plan", "--costs", heavy, *replicas, "--bandwidth", 10).stdout
    assert "for analysis only" in table
    assert "plan without --replicate" in table


def test_auto_ranks_all_methods_and_writes_what_it_prints(unlatch, costs):
    result = unlatch("plan", "--costs", costs(chain(*[1] * 8)), "--devices", 4, "--json", "-o", "plan.json")
    found = json.loads(result.stdout)
    assert found == json.loads(Path("plan.json").read_text())
    assert not found["refused"]
    assert found["config"] == found["ranking"][0]["config"]
    assert {"bp", "1f1b", "pipedream", "layerpipe", "petra", "dtr", "dgl"} <= {
        one["method"] for one in found["ranking"]
    }
    placed = next(one for one in found["ranking"] if one["method"] == "layerpipe")
    assert len({task["device"] for task in placed["plan"]["tasks"]}) == placed["stages"] == 4


def test_auto_says_how_far_to_trust_its_risks(unlatch, costs):
    given = ("plan", "--costs", costs(chain(*[1] * 8)), "--devices", 2)
    shown = {method: unlatch(*given, "--method", method).stdout for method in ("auto", "pipedream")}
    assert {method: ELSEWHERE in text for method, text in shown.items()} == {"auto": True, "pipedream": False}


def test_slow_links_made_auto_favour_layerpipe(answer):
    """Straight methods used to be cut as if messages were free, and were slower than one device alone."""
    layers = chain(*[1] * 8, activation_bytes=60, weight_bytes=1000)
    for bandwidth in (0.5, 10, 40):
        found = answer(layers, 4, "--bandwidth", bandwidth)
        times = {one["method"]: one["time_per_batch"] for one in found["ranking"]}
        assert all(time <= 23 * 1.34 for time in times.values()), "nobody is slower than one device that recomputes"
        assert times["pipedream"] <= 23
        assert times["1f1b"] <= 23


def test_a_published_network_has_64_samples_in_both_commands(unlatch):
    flags = ("--network", "alexnet", "--devices", 2)
    plan = json.loads(unlatch("plan", *flags, "--method", "pipedream", "--json").stdout)
    simulated = json.loads(unlatch("simulate", *flags, "--methods", "pipedream", "--json").stdout)["rows"][0]
    assert simulated["time_per_batch"] == pytest.approx(plan["initiation_interval"])
    for command in ("plan", "simulate"):
        assert "[default: 64]" in unlatch(command, "--help").stdout


# --------------------------------------------------------------------- bad input

GOOD = {"name": "a", "F": 1, "D": 1, "G": 1}
FILES = {
    "nan": ('[{"name": "a", "F": NaN, "D": 1, "G": 1}]', "F must be finite and not negative, got nan"),
    "infinity": ('[{"name": "a", "F": 1, "D": 1, "G": Infinity}]', "G must be finite"),
    "overflow": ('[{"name": "a", "F": 1e999, "D": 1, "G": 1}]', "F must be finite"),
    "huge": ([{**GOOD, "F": 1e101}], "0 or between 1e-100 and 1e+100"),
    "huge integer": ([{**GOOD, "F": 10**400}], "0 or between 1e-100 and 1e+100"),
    "endless integer": ('[{"name": "a", "G": 1, "D": 1, "F": ' + "9" * 5000 + "}]", "thousands of digits"),
    "tiny": ([{**GOOD, "F": 1e-101}], "0 or between 1e-100 and 1e+100"),
    "huge bytes": ([{**GOOD, "weight_bytes": 1e200}], "weight_bytes must be 0 or between"),
    "negative": ([{**GOOD, "F": -1}], "F must be finite and not negative, got -1"),
    "all zero": ([{**GOOD, "F": 0, "G": 0}], "all costs are zero"),
    "empty list": ([], "an empty list"),
    "empty file": ("", "is empty"),
    "object": ({}, "expected a list of layers"),
    "text": ('"layers"', "expected a list of layers"),
    "list of lists": ([[1]], "layer 0: expected an object"),
    "deep": ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "truncated": ('[{"name": "a", "F": 1', "(is the end missing?)"),
    "two of a name": ([GOOD, {**GOOD, "name": "b"}, GOOD], "layers 0 and 2 are both called 'a'"),
    "missing key": ([{"name": "a", "F": 1}], "G missing"),
    "wrong type": ([{**GOOD, "F": "1"}], "F must be a number, got '1'"),
    "wrong nested type": ([{**GOOD, "F": {"x": 1}}], "F must be a number, got {'x': 1}"),
    "truth value": ([{**GOOD, "G": True}], "G must be a number, got True"),
    "null": ([{**GOOD, "D": None}, {**GOOD, "name": "b", "D": None}], "D must be a number, got None"),
    "no name": ([{"F": 1, "D": 1, "G": 1}], "name missing"),
    "long name": ([{"name": "n" * 10_000, "F": 1, "D": 1, "G": "x"}], "(10002 characters)"),
    "near miss": ([{**GOOD, "activation_byte": 1}], "Did you mean 'activation_bytes'"),
}


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("case", FILES)
def test_bad_costs_are_refused_in_words(unlatch, costs, case, command):
    content, phrase = FILES[case]
    result = unlatch(command, "--costs", costs(content))
    assert result.exit_code == 2, result.output
    assert phrase in result.stderr
    assert "layers.json" in result.stderr
    assert len(result.stderr) < 600


def test_costs_that_are_no_text_file(unlatch, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for name, phrase in (("folder", "Is a directory"), ("binary", "not a text file"), ("absent", "No such file")):
        result = unlatch("plan", "--costs", name)
        assert (result.exit_code, phrase in result.stderr, name in result.stderr) == (2, True, True), result.output


FLAGS = {
    "mode of another method": (["--method", "pipedream", "--mode", "atomic"], "--mode belongs to --method layerpipe"),
    "mode of auto": (["--mode", "atomic"], "--mode belongs to --method layerpipe, not to auto"),
    "unknown mode": (
        ["--method", "layerpipe", "--mode", "fraction"],
        "'fraction' is not one of 'divisible', 'atomic', 'factor'",
    ),
    "empty mode": (["--method", "layerpipe", "--mode", ""], "'' is not one of"),
    "unknown method": (["--method", "gpipe"], "--method is layerpipe, pipedream or auto, got 'gpipe'"),
    "unknown placement": (
        ["--method", "layerpipe", "--placement", "best"],
        "'best' is not one of 'row', 'list', 'exact'",
    ),
    "placement of another method": (["--placement", "row"], "--placement belongs to --method layerpipe"),
    "replicas of another method": (["--method", "layerpipe", "--replicate"], "--replicate belongs to --method pipedr"),
    "memory of another method": (["--method", "layerpipe", "--memory", "1e9"], "--memory belongs to --method auto"),
    "no memory": (["--memory", "0"], "--memory is a number of bytes above 0"),
    "memory that is no number": (["--memory", "nan"], "--memory is a number of bytes above 0"),
    "list with links": (
        ["--method", "layerpipe", "--placement", "list", "--bandwidth", "1"],
        "--placement list knows no links",
    ),
    "pipedream with latency": (["--method", "pipedream", "--latency", "1"], "--latency has no place"),
    "no bandwidth": (["--bandwidth", "0"], "--bandwidth is in bytes"),
    "bandwidth that is no number": (["--bandwidth", "nan"], "--bandwidth is in bytes"),
    "negative latency": (["--latency", "-1"], "--latency is a time"),
    "endless latency": (["--latency", "inf"], "--latency is a time"),
    "endless devices": (["--devices", "1000000000000"], "--devices goes up to 100,000"),
    "no devices": (["--devices", "0"], "--devices"),
    "cost model of a file": (["--cost-model", "mac"], "--cost-model mac has nothing to do"),
    "batch of a file": (["--batch", "8"], "--batch belongs to --network"),
    "array of a file": (["--array", "8"], "--array belongs to --cost-model systolic"),
    "two sources": (["--network", "vgg16"], "got 2 of them"),
    "a folder to write to": (["-o", "."], "is a folder"),
    "no folder to write to": (["-o", "nowhere/plan.json"], "there is no folder nowhere"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_bad_flags_are_refused_in_words(unlatch, costs, case):
    flags, phrase = FLAGS[case]
    result = unlatch("plan", "--costs", costs(chain(1, 1)), *flags)
    assert result.exit_code == 2, result.output
    assert phrase in result.stderr
    assert "Traceback" not in result.output


def test_the_optimizer_of_the_settings_was_not_read(unlatch, conf):
    """Risks were those of SGD with Nesterov momentum, whatever the settings named."""

    def pipedream(optimizer: str) -> tuple[str, float | None]:
        conf.write_text(conf.read_text().partition("[optimizer]")[0] + f"[optimizer]\n{optimizer}\n")
        ranked = json.loads(unlatch("plan", conf, "--cost-model", "mac", "--devices", 2, "--json").stdout)["ranking"]
        return next((one["risk"], one["stability"]) for one in ranked if one["method"] == "pipedream")

    assert pipedream("momentum = 0.9") == ("about bp", pytest.approx(0.770, abs=1e-3))
    assert pipedream("momentum = 0.9\nnesterov = false") == ("some loss", pytest.approx(0.2))
    assert pipedream('name = "Adam"')[1] == pytest.approx(2.0)
    assert pipedream('name = "RMSprop"') == ("not known", None)


def test_a_plan_by_measured_costs_counts_what_this_machine_takes_for_actions_and_messages(unlatch, conf):
    """A perceptron on two processes is slower than in one: every method was promised a speed-up."""
    flags = ("plan", conf, "--devices", 2, "--json")
    found = json.loads(unlatch(*flags).stdout)
    assert found["measured"].pop("latency") >= 0
    assert min(found["measured"].values()) > 0
    assert not found["pays"]
    ideal = json.loads(unlatch(*flags, "--ideal").stdout)
    assert ideal["pays"]
    assert "measured" not in ideal
    assert "no method pays here" in unlatch(*flags[:-1]).stdout
    # Links that were asked for are not called measured, and one without a limit is no number of JSON.
    text = unlatch(*flags, "--latency", "0.001").stdout
    given = json.loads(text, parse_constant=pytest.fail)
    assert set(given["measured"]) == {"action", "update"}
    assert given["links"] == {"bandwidth": None, "latency": 0.001}


def test_momentum_that_a_method_raises_was_not_counted_by_the_plan(unlatch, conf):
    """`run.advice` looks at optimizers as the method sets them; the plan judged the method as if it had not."""
    conf.write_text(conf.read_text().partition("[optimizer]")[0] + '[optimizer]\nname = "NAdam"\n')
    flags = ("--cost-model", "mac", "--devices", 2, "--json")
    ranked = json.loads(unlatch("plan", conf, *flags).stdout)["ranking"]
    limits = {one["method"]: one["stability"] for one in ranked}
    assert limits["asyncpp"] > 1.1 * limits["pipedream"]


def test_an_optimizer_that_asks_for_names_was_planned_without_weights(conf):
    """Updates of `MuonAdamW` were measured on no weights at all, and so were free."""
    conf.write_text(conf.read_text().partition("[optimizer]")[0] + '[optimizer]\nname = "unlatch.optim:MuonAdamW"\n')
    optimizer = layer_costs(CostSource(None, None, conf, "mac")).optimizer
    assert sum(len(group["params"]) for group in optimizer.param_groups) > 0
