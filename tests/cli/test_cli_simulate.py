"""`unlatch simulate`: hand-worked makespans, sweeps, files that others can read, and bad input."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest


@pytest.fixture
def layers(tmp_path):
    """Four equal layers in a file."""
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([{"name": f"l{n}", "F": 1, "D": 1, "G": 1} for n in range(4)]))
    return path


@pytest.fixture
def rows(unlatch, layers):
    """The rows that `unlatch simulate` prints."""

    def ask(*flags: object) -> list[dict]:
        result = unlatch("simulate", "--costs", layers, *flags, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["rows"]

    return ask


def makespan(trace: str) -> float:
    """End of the last action in a trace, in its own unit."""
    events = [e for e in json.loads(Path(trace).read_text())["traceEvents"] if e["ph"] == "X"]
    return max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)


@pytest.mark.parametrize(("devices", "slope", "start"), [(2, 6, 5), (3, 5, 2), (4, 3, 8)])
def test_makespans_of_pipedream(unlatch, layers, devices, slope, start):
    """Self-timed 1F1B without flush on four equal layers: 6 N + 5, 5 N + 2, 3 N + 8."""
    for batches in (4, 10):
        flags = ("--methods", "pipedream", "--devices", devices, "--batches", batches, "--trace", "trace.json")
        result = unlatch("simulate", "--costs", layers, *flags, "--json")
        parts = json.loads(result.stdout)["rows"][0]["microbatches"]
        # A micro-batch takes its share of the time, and there are so many more of them.
        assert makespan("trace.json") / 1e6 == pytest.approx((slope * batches * parts + start) / parts)


def test_intervals_of_the_tables(rows):
    found = rows("--methods", "pipedream", "--devices", "1..6")
    assert [row["time_per_batch"] for row in found] == pytest.approx([11, 6, 5, 3, 3, 3])
    assert [row["stages"] for row in found] == [1, 2, 3, 4, 4, 4]
    found = rows("--methods", "layerpipe", "--devices", "1..6,8,11")
    assert [row["time_per_batch"] for row in found] == pytest.approx([11, 5.5, 4, 2.75, 2.5, 2, 1.5, 1])
    assert [row["utilisation"] for row in found] == pytest.approx(
        [11 / row["devices"] / row["time_per_batch"] for row in found]
    )


def test_synchronous_methods_lose_time_filling(rows):
    found = {row["method"]: row for row in rows("--methods", "gpipe,1f1b,zb-h1,zb-h2,bp", "--devices", 4)}
    assert found["gpipe"]["time_per_batch"] == pytest.approx(found["1f1b"]["time_per_batch"])
    assert found["zb-h2"]["time_per_batch"] <= found["zb-h1"]["time_per_batch"] < found["1f1b"]["time_per_batch"]
    assert found["bp"]["speedup"] == pytest.approx(1)
    assert all(row["staleness"] == 0 for row in found.values())


def test_a_sweep_with_curves_and_a_table(unlatch, layers):
    flags = ("--devices", "1..4*2", "--methods", "pipedream,layerpipe")
    shown = unlatch("simulate", "--costs", layers, *flags, "--csv", "sweep.csv", "--picture", "sweep.svg", "--json")
    rows = json.loads(shown.stdout)["rows"]
    with Path("sweep.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(row["method"], int(row["devices"])) for row in read] == [
        (name, count) for name in ("pipedream", "layerpipe") for count in (1, 2, 4)
    ]
    assert [float(row["speedup"]) for row in read] == pytest.approx([row["speedup"] for row in rows])
    assert "<svg" in Path("sweep.svg").read_text()
    table = unlatch("simulate", "--costs", layers, *flags).stdout.splitlines()
    assert table[0].split()[:3] == ["method", "devices", "time/batch"]
    assert [line.split()[:3] for line in table[1:]] == [
        ["pipedream", "1", "11"],
        ["pipedream", "2", "6"],
        ["pipedream", "4", "3"],
        ["layerpipe", "1", "11"],
        ["layerpipe", "2", "5.5"],
        ["layerpipe", "4", "2.75"],
    ]


def test_local_methods_are_simulated_with_their_networks_and_messages(rows, layers):
    heavy = [{"name": f"l{n}", "F": 1, "D": 1, "G": 1, "activation_bytes": 100} for n in range(4)]
    layers.write_text(json.dumps(heavy))
    found = {row["method"]: row for row in rows("--methods", "auxnet,auxvar,sph,dgl,dni,pipedream", "--devices", 2)}
    assert all(row["staleness"] == 0 for name, row in found.items() if name != "pipedream")
    # Heads, AuxNets and synthesisers cost time; stored variables do not. Outputs go up, and more than that comes down.
    assert found["pipedream"]["time_per_batch"] == found["auxvar"]["time_per_batch"] == 6
    assert found["dgl"]["time_per_batch"] == 5 + 3
    assert found["dni"]["time_per_batch"] == 5 + 3 + 9
    assert found["auxnet"]["time_per_batch"] > 6
    assert found["dgl"]["communication_bytes"] == 100
    assert found["auxnet"]["communication_bytes"] == found["dni"]["communication_bytes"] == 200


@pytest.mark.parametrize("method", ["1f1b", "layerpipe", "auxnet", "dni"])
def test_timelines_in_all_forms(unlatch, layers, method):
    flags = ("--methods", method, "--devices", 2, "--batches", 3)
    files = ("--picture", "line.png", "--html", "line.html", "--trace", "line.json")
    assert unlatch("simulate", "--costs", layers, *flags, *files).exit_code == 0
    assert Path("line.png").read_bytes().startswith(b"\x89PNG")
    page = Path("line.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    assert f"{method}, 2 devices (simulated)" in page
    assert not re.search(r'(?:src|href)\s*=\s*["\']https?:', page), "self-contained"
    events = json.loads(Path("line.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
    by_device: dict[int, float] = {}
    for event in sorted(spans, key=lambda event: event["ts"]):
        assert event["ts"] >= by_device.get(event["pid"], 0) - 1e-6, "a device does one thing at a time"
        by_device[event["pid"]] = event["ts"] + event["dur"]


def heavy_weights(layers, nbytes=80):
    layers.write_text(json.dumps([{"name": f"l{n}", "F": 1, "D": 1, "G": 1, "weight_bytes": nbytes} for n in range(4)]))


def test_replicas_share_rows_and_sum_gradients(rows, layers):
    heavy_weights(layers)
    flags = ("--methods", "bp", "--devices", "4", "--replicas", 4)
    free = rows(*flags)[0]
    # All four layers on each device, a quarter of the rows, and 11 units of work in the whole batch.
    assert (free["stages"], free["replicas"], free["time_per_batch"]) == (1, 4, pytest.approx(11 / 4))
    assert free["speedup"] == pytest.approx(4)
    # Each of four sends three quarters of 320 bytes twice, to add up shares and to tell the sums.
    assert free["communication_bytes"] == pytest.approx(4 * 2 * 0.75 * 320)
    # A share of 80 bytes goes over a wire of its own to each of the others, and a sum comes back: 8 units each.
    assert rows(*flags, "--bandwidth", 10)[0]["time_per_batch"] == pytest.approx(11 / 4 + 8 + 8)
    two = rows("--methods", "bp", "--devices", 2, "--replicas", 2, "--bandwidth", 10)[0]
    assert two["time_per_batch"] == pytest.approx(11 / 2 + 32)
    assert two["communication_bytes"] == pytest.approx(2 * 320)


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "pipedream", "dtrp", "petra", "dgl", "auxnet"])
def test_the_simulated_replicas_are_those_that_are_trained(rows, unlatch, layers, method):
    heavy_weights(layers)
    one = rows("--methods", method, "--devices", 2)[0]
    two = rows("--methods", method, "--devices", 4, "--replicas", 2)[0]
    assert two["stages"] == one["stages"] == 2
    assert two["staleness"] == one["staleness"]
    assert two["time_per_batch"] == pytest.approx(one["time_per_batch"] / 2, rel=0.2)
    # Once per update both replicas of both stages send all gradients, beside what either pipeline sends.
    assert two["communication_bytes"] >= 4 * 160 - 1
    flags = ("--methods", method, "--devices", 4, "--replicas", 2, "--batches", 3)
    files = ("--html", "line.html", "--trace", "line.json")
    assert unlatch("simulate", "--costs", layers, *flags, *files).exit_code == 0
    assert f"{method}, 4 devices, 2 replicas (simulated)" in Path("line.html").read_text()
    spans = [e for e in json.loads(Path("line.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}


def test_replicas_are_a_column_of_the_table(unlatch, layers):
    flags = ("simulate", "--costs", layers, "--devices", 2, "--methods", "bp")
    assert unlatch(*flags, "--replicas", 2).stdout.splitlines()[0].split()[:3] == ["method", "devices", "replicas"]
    assert "replicas" not in unlatch(*flags).stdout


def test_jitter_is_seeded(rows):
    flags = ("--methods", "pipedream", "--devices", 4, "--jitter", 0.3, "--batches", 40, "--seed")
    first, again, other = (rows(*flags, seed)[0]["time_per_batch"] for seed in (1, 1, 2))
    assert first == again != other
    assert first > 3


def test_links_slow_a_pipeline_down_to_one_device_at_worst(unlatch, layers):
    """`--bandwidth` used to leave straight methods cut as if messages were free, at a hundredth of the speed."""
    heavy = [{"name": f"l{n}", "F": 1, "D": 1, "G": 1, "activation_bytes": 100} for n in range(4)]
    layers.write_text(json.dumps(heavy))
    for overlapped in ("--overlapped", "--no-overlapped"):
        flags = ("--methods", "pipedream,1f1b,gpipe", "--devices", 4, "--bandwidth", 0.1, overlapped, "--json")
        for row in json.loads(unlatch("simulate", "--costs", layers, *flags).stdout)["rows"]:
            assert (row["stages"], row["speedup"], row["communication_bytes"]) == (1, pytest.approx(1), 0)


def test_without_a_source_it_is_vgg16(unlatch):
    result = unlatch("simulate", "--devices", 2, "--json")
    named = unlatch("simulate", "--network", "vgg16", "--devices", 2, "--json")
    assert json.loads(result.stdout) == json.loads(named.stdout)


FLAGS = {
    "factor of nothing": (["--devices", "2..8*0"], "the factor, at least 2"),
    "factor of one": (["--devices", "2..8*1"], "the factor, at least 2"),
    "negative factor": (["--devices", "2..8*-2"], "the factor, at least 2"),
    "factor without a range": (["--devices", "8*2"], "2..64*2"),
    "reversed range": (["--devices", "8..2"], "from small to large"),
    "negative devices": (["--devices", "-3"], "from small to large, from 1 on"),
    "no devices": (["--devices", "0"], "from 1 on"),
    "enormous range": (["--devices", "1..1000000000000"], "too many numbers of devices"),
    "many ranges": (["--devices", "1..900,1..900"], "too many numbers of devices"),
    "enormous number": (["--devices", "1000000000000"], "--devices goes up to 100,000"),
    "endless number": (["--devices", "9" * 5000], "no numbers of devices"),
    "half a range": (["--devices", "2.."], "no numbers of devices"),
    "words": (["--devices", "many"], "no numbers of devices"),
    "nothing": (["--devices", ""], "no numbers of devices"),
    "no methods": (["--methods", ","], "--methods: which?"),
    "unknown method": (["--methods", "pipedraem"], "Did you mean 'pipedream'"),
    "negative jitter": (["--jitter", "-1"], "--jitter is a relative standard deviation"),
    "endless jitter": (["--jitter", "inf"], "--jitter is a relative standard deviation"),
    "jitter that is no number": (["--jitter", "nan"], "--jitter is a relative standard deviation"),
    "negative seed": (["--seed", "-1"], "--seed"),
    "no replicas": (["--replicas", "0"], "'--replicas': Input should be greater than or equal to 1"),
    "negative replicas": (["--replicas", "-2"], "'--replicas': Input should be greater than or equal to 1"),
    "half a replica": (["--replicas", "1.5"], "Invalid value for '--replicas'"),
    "replicas in words": (["--replicas", "two"], "Invalid value for '--replicas'"),
    "replicas that devices cannot be shared out among": (
        ["--devices", "2..4", "--replicas", "2"],
        "3 devices cannot be shared out among 2 replicas",
    ),
    "replicas of cgad": (["--methods", "cgad", "--replicas", "2"], "cgad cannot train 2 replicas: its rule for gr"),
    "replicas of dni": (["--methods", "bp,dni", "--replicas", "2"], "dni cannot train 2 replicas: "),
    "replicas of auxvar": (["--methods", "auxvar", "--replicas", "2"], "auxvar cannot train 2 replicas: "),
    "replicas of sph": (["--methods", "sph", "--replicas", "2"], "sph cannot train 2 replicas: "),
    "replicas of layerpipe": (["--methods", "layerpipe", "--replicas", "2"], "layerpipe cannot train 2 replicas: "),
    "no batches": (["--batches", "0"], "--batches"),
    "endless batches": (["--batches", "1000000000000"], "more than 60,000,000 actions"),
    "no bandwidth": (["--bandwidth", "-1"], "--bandwidth is in bytes"),
    "picture of unknown form": (["--picture", "line.bmp2"], "ends in .png or .svg or .pdf"),
    "picture into a folder": (["--picture", "."], "is a folder"),
    "csv into no folder": (["--csv", "nowhere/rows.csv"], "there is no folder nowhere"),
    "page into no folder": (["--html", "nowhere/page.html"], "there is no folder nowhere"),
    "trace into a folder": (["--trace", "."], "is a folder"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_bad_flags_are_refused_in_words(unlatch, layers, case):
    flags, phrase = FLAGS[case]
    result = unlatch("simulate", "--costs", layers, *flags)
    assert result.exit_code == 2, result.output
    assert phrase in result.stderr
    assert "Traceback" not in result.output
