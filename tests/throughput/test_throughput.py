"""Every system takes its turns and becomes a row: with numbers, or with the reason why it has none."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from throughput_subjects import Broken, batch, batches, halving, layers, learnt, normed, pairs, subject, tied
from unlatch.cli import app, throughputs
from unlatch.errors import UnlatchError
from unlatch.io.results import Results
from unlatch.methods import get
from unlatch.throughput import DDP, Independent, Ours, Plain, Row, Subject, TorchPipeline, compare, draw, everybody
from unlatch.throughput.systems import Loop

FIELDS = {
    *("system", "method", "ranks", "threads", "precision", "samples_per_s", "ratio", "limit", "peak_bytes"),
    *("rounds", "spread", "reason", "starts"),
}


def test_all_kinds_of_systems_in_one_run() -> None:
    """The one in the middle fails on its ranks and must not take the others with it."""
    systems = [Plain(), Independent(), Broken(), DDP(), TorchPipeline("zero bubble", 2), Ours(get("fdg"))]
    rows = compare(subject(), systems, 2, rounds=1, steps=2)
    assert [row.system for row in rows] == ["pytorch", "limit", "broken", "pytorch", "torch pipelining", "unlatch"]
    failed = {row.system + " " + row.method: row.reason for row in rows if row.reason is not None}
    assert set(failed) == {"broken on ranks"}
    assert "raised RuntimeError: no such luck" in failed["broken on ranks"]
    plain, limit, _, *others = rows
    assert plain.ratio == 1.0
    assert limit.limit == 1.0
    for row in [plain, limit, *others]:
        assert row.samples_per_s is not None
        assert row.samples_per_s > 0
        assert row.ratio == pytest.approx(row.samples_per_s / plain.samples_per_s)
        assert row.limit == pytest.approx(row.samples_per_s / limit.samples_per_s)
        assert row.rounds == 1
        assert row.spread == (row.ratio, row.ratio)
    assert [row.ranks for row in rows] == [1, 2, 2, 2, 2, 2]
    assert others[1].starts is not None
    assert len(others[1].starts) == 2


REASONS = {
    "tied weights": (TorchPipeline("1f1b", 2), subject(tied), "share weights"),
    "two tensors": (TorchPipeline("gpipe", 2, (0, 2)), subject(pairs), "before block '2' is no single tensor"),
    "unequal micro-batches": (TorchPipeline("1f1b", 8), subject(samples=12), "12 samples do not make 8"),
    "too few blocks": (TorchPipeline("1f1b", 2), subject(partial(nn.Linear, 16, 16)), "does not say where"),
    "too few samples": (DDP(), subject(samples=1), "1 samples"),
    "too few stages": (Ours(get("fdg")), subject(pairs), "stages"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_train_the_model_says_why(name: str) -> None:
    system, one, words = REASONS[name]
    ranks = 5 if name == "too few stages" else 2
    with pytest.raises(UnlatchError, match=words):
        system.fitted(one, ranks)


def test_what_was_measured_before_a_kill_is_not_measured_again(tmp_path) -> None:
    """Systems that are found in the file are not even fitted; others, and other steps, are measured as ever."""
    file = tmp_path / "speeds.jsonl"
    key = {"round": 0, "steps": 2, "ranks": 2, "precision": "fp32", "peaks": [7, 9]}
    with Results(file) as results:
        results.add(key | {"system": "pytorch 1 thread", "samples_per_s": 100.0, "cut": None})
        results.add(key | {"system": "broken on ranks", "samples_per_s": 150.0, "cut": [0, 2]})
    with Results(file) as results:
        plain, broken, measured = compare(subject(), [Plain(), Broken(), DDP()], 2, rounds=1, steps=2, results=results)
        assert [row["system"] for row in results.rows][2:] == ["pytorch DDP"]
        others = compare(subject(), [Broken()], 2, rounds=1, steps=3, results=results)
    assert (plain.samples_per_s, broken.ratio, broken.starts, broken.peak_bytes) == (100.0, 1.5, (0, 2), 9)
    assert measured.ratio == pytest.approx(measured.samples_per_s / 100)
    assert others[0].reason is not None


def test_time_that_is_over_is_a_reason() -> None:
    rows = compare(subject(), [Plain(), DDP()], 2, seconds=-1.0)
    assert [row.reason for row in rows] == ["not measured: the -1 s were over"] * 2


def test_the_loop_is_plain_pytorch() -> None:
    one, model, other = subject(), layers(), layers()
    loop, optimizer = Loop(one, model, batch()), torch.optim.SGD(other.parameters(), lr=0.01)
    for _ in range(3):
        loop.step()
        optimizer.zero_grad()
        nn.functional.mse_loss(other(batch()[0]), batch()[1]).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


EXACT = [Plain(), Plain(2), DDP(), TorchPipeline("1f1b", 4, (0, 2)), TorchPipeline("zero bubble", 2, (0, 2))]


def test_systems_without_delay_learn_the_same_from_a_stream_of_batches(ranks2) -> None:
    """Every rank takes its share of what all are fed, learning rates follow their schedule, all weights come back."""
    one, data = replace(subject(), lr_scheduler=halving), batches(4)
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = halving(optimizer)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    for system in [*EXACT, Ours(get("1f1b", microbatches=2)).fitted(one, 2)]:
        for found in ranks2.run(learnt, system, one, data)[: system.processes(2)]:
            assert list(found) == list(model.state_dict()), str(system)
            for name, tensor in model.state_dict().items():
                # Sums in another order differ in the last bits of fp32.
                torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{system}: {name}")


def test_batch_norm_counts_every_micro_batch_of_torchs_pipelines_once(ranks2) -> None:
    system, data = TorchPipeline("1f1b", 2, (0, 2)), batches(3)
    found = ranks2.run(learnt, system, subject(normed), data)[0]
    assert {name: int(n) for name, n in found.items() if name.endswith("tracked")} == {
        f"{block}.1.num_batches_tracked": 6 for block in range(4)
    }
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_everybody_takes_part() -> None:
    found = [str(system) for system in everybody(subject(), 4, [get("dtr")])]
    torch_ones = [f"torch pipelining {o} x{m}" for o in ("gpipe", "1f1b", "zero bubble") for m in (2, 4, 8)]
    plain = ["pytorch 1 thread", "limit independent processes", "pytorch 4 threads", "pytorch DDP"]
    assert found == [*plain, *torch_ones, "unlatch dtr"]


def test_who_can_be_compiled_takes_part_twice() -> None:
    found = [str(system) for system in everybody(subject(), 2, [get("dtr")], [2], compile="aot_eager")]
    plain = ["pytorch 1 thread", "limit independent processes", "pytorch 1 thread, compiled", "pytorch 2 threads"]
    assert found[:4] == plain
    assert found[-2:] == ["unlatch dtr", "unlatch dtr, compiled"]


def test_compiled_systems_learn_the_same_and_one_that_cannot_has_a_reason(ranks2) -> None:
    data = batches(3)
    ways = [(Plain(1, way), Ours(get("1f1b", microbatches=2), compile=way)) for way in (False, "aot_eager")]
    found = [
        [ranks2.run(learnt, system.fitted(subject(), 2), subject(), data)[0] for system in systems] for systems in ways
    ]
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnlatchError, match="zb-h1 does the two halves of a backward apart"):
        Ours(get("zb-h1"), compile="aot_eager").fitted(subject(), 2)


def test_bf16_runs_forwards_under_autocast() -> None:
    seen: list[torch.dtype] = []
    one = Subject(layers, batch, lambda out, y: (seen.append(out.dtype), (out - y).square().mean())[1], None, "bf16")
    one.loss(layers(), *batch())
    assert seen == [torch.bfloat16]


def rows_of(*_: object, **__: object) -> list[Row]:
    return [
        Row("pytorch", "1 thread", 1, 1, "fp32", 100.0, 1.0, 0.5, 10_000_000, 3, (1.0, 1.0)),
        Row("unlatch", "fdg", 2, 1, "fp32", 180.0, 1.8, 0.9, 12_000_000, 3, (1.7, 1.9), None, (0, 2)),
        Row("unlatch", "petra", 2, 1, "fp32", reason="it is not reversible"),
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """The command with rows that took no time; what it asked for is kept."""
    seen: dict[str, object] = {}

    def compared(one, systems, ranks, **options):
        seen.update(options, systems=[str(system) for system in systems], ranks=ranks)
        return rows_of()

    monkeypatch.setattr(throughputs, "compare", compared)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf.toml").write_text('[model]\nname = "mlp"\n[method]\nname = "dtr"\n[run]\nstages = 2\n')
    return seen


def test_the_command_prints_a_table_and_the_reasons(asked, tmp_path) -> None:
    result = CliRunner().invoke(app, ["bench", "throughput", "conf.toml", "--quick", "--out", "speed.png"])
    assert result.exit_code == 0, result.output
    assert "1.70 .. 1.90" in result.stdout
    assert "unlatch petra: it is not reversible" in result.stdout
    assert (tmp_path / "speed.png").stat().st_size > 1000
    assert asked["ranks"] == 2
    assert asked["rounds"] == 3
    assert 100 < asked["seconds"] <= 150
    assert asked["systems"][:8][-1] == "unlatch dtr"  # the file's own method comes before the others
    assert len(asked["systems"]) == 4 + 3 + len({name for name in asked["systems"] if name.startswith("unlatch")})


def test_the_help_of_bench_names_it() -> None:
    assert "`unlatch bench throughput`" in " ".join(CliRunner().invoke(app, ["bench", "--help"]).stdout.split())
    shown = CliRunner().invoke(app, ["bench", "throughput", "--help"]).stdout
    assert "--quick" in shown


def test_the_command_prints_json(asked) -> None:
    flags = ["--methods", "fdg,petra", "--ranks", "4", "--json"]
    result = CliRunner().invoke(app, ["bench", "throughput", "conf.toml", *flags])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [set(row) for row in found["rows"]] == [FIELDS] * 3
    assert found["rows"][1]["spread"] == [1.7, 1.9]
    assert asked["systems"][-2:] == ["unlatch fdg", "unlatch petra"]
    assert asked["ranks"] == 4
    assert asked["seconds"] is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--methods", "dtrr"], "dtr"),
        (["--methods", ","], "--methods names none"),
        (["--out", "speed.txt"], ".png"),
        (["--ranks", "1"], "2"),
        (["--set", "data.batch_size=100000"], "only"),
    ],
)
def test_bad_flags_are_refused_before_anything_runs(asked, flags, words) -> None:
    result = CliRunner().invoke(app, ["bench", "throughput", "conf.toml", *flags])
    assert result.exit_code == 2
    assert words in result.output
    assert asked == {}


def test_the_picture_leaves_out_what_was_not_measured() -> None:
    labels = [label.get_text() for label in draw(rows_of()).axes[0].get_yticklabels()]
    assert labels == ["pytorch: 1 thread", "unlatch: fdg"]
