"""`unlatch train`: what it writes, what it says, and that continued and distributed runs are the same run."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from commands import same_weights
from unlatch import config
from unlatch.errors import ConfigError
from unlatch.io import checkpoint, metrics
from unlatch.train import Trainer
from unlatch.train.exact import unpacked

CONSTANT = ("--set", "lr.shape=constant", "--set", "optimizer.lr=0.05")


def test_a_run_folder_holds_everything(unlatch, conf, tmp_path):
    result = unlatch("train", conf, "--method", "dtr", "--stages", 2, "--epochs", 2, "--out", "run", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    folder = tmp_path / "run"
    assert summary["status"] == "finished"
    assert summary["out"] == "run"
    assert json.loads((folder / "summary.json").read_text()).items() <= summary.items()
    assert 0.0 < summary["accuracy"] <= 1.0
    assert [stage["staleness"] for stage in summary["stages"]] == [1.0, 0.0]
    assert config.load(folder / "config.toml").method.name == "dtr"
    assert json.loads((folder / "versions.json").read_text())["torch"]
    rows = metrics.read(folder)
    assert sum("train/loss" in row for row in rows) >= 10
    assert [row["epoch/number"] for row in rows if "epoch/number" in row] == [1, 2]
    last = rows[-1]
    assert last["eval/accuracy"] == summary["accuracy"]
    assert {"stage0/staleness", "stage0/bubble", "stage1/peak_bytes"} <= last.keys()
    assert (folder / "metrics.csv").read_text().startswith("step,time,name,value\n")


def test_the_summary_names_the_cut_where_there_is_one(unlatch, conf, cut):
    def split(*flags):
        result = unlatch("train", conf, "--json", *flags)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["split"]

    assert split("--method", "dtr", *cut) == ["layers.2"]
    assert split("--method", "bp") == []
    assert split("--method", "layerpipe", "--stages", 2) is None


def test_events_are_those_of_all_stages_in_order_of_time(unlatch, conf, tmp_path):
    unlatch("train", conf, "--method", "fdg", "--stages", 3, "--out", "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {event["stage"] for event in events} == {0, 1, 2}
    assert [event["start"] for event in events] == sorted(event["start"] for event in events)
    assert events[0]["start"] == 0.0
    assert {event["kind"] for event in events} == {"F", "B", "U"}


def test_plain_lines_without_a_terminal(unlatch, conf):
    result = unlatch("train", conf, "--stages", 2, "--method", "pipedream", "--epochs", 2)
    assert "epoch 1/2  loss " in result.stdout
    assert "epoch 2/2  loss " in result.stdout
    assert "\x1b[" not in result.stdout
    assert "stage  blocks" in result.stdout
    assert "all stages together: a* = " in result.stdout
    assert "writing to runs/pipedream-1" in result.stdout


def test_an_optimizer_without_theory_is_named(unlatch, conf):
    flags = ("--set", "optimizer.name=RMSprop", "--set", "optimizer.lr=0.001")
    result = unlatch("train", conf, "--method", "pipedream", "--stages", 2, *flags)
    assert "stability: no advice: there is no theory of delay here for RMSprop" in result.stdout


def test_a_setting_that_loses_accuracy_is_named_with_its_cure(unlatch, conf):
    flags = ("--set", "method.microbatches=1", "--set", "optimizer.nesterov=false")
    result = unlatch("train", conf, "--method", "fdg", "--stages", 4, *flags)
    assert "warning: gradients are up to 5 updates late" in result.stdout
    assert "a large loss of accuracy is likely" in result.stdout
    assert "unlatch.methods.FDG(microbatches=8)" in result.stdout
    assert "as flags: --set method.microbatches=8\n" in result.stdout
    cured = unlatch("train", conf, "--method", "fdg", "--stages", 4, *flags, "--set", "method.microbatches=8")
    assert "warning" not in cured.output


def test_another_method_drops_options_it_does_not_know(unlatch, conf):
    conf.write_text(conf.read_text() + 'stages = 2\n[method]\nname = "dtrp"\ncompensate = 2\naccumulate = 2\n')
    result = unlatch("train", conf, "--method", "fdg")
    assert "note: fdg has no option compensate" in result.stdout
    assert "FDG(microbatches=1, accumulate=2" in result.stdout


@pytest.mark.parametrize("asked", [("--method", "petra"), ("--set", "method.name=petra")])
def test_an_option_of_the_same_name_is_not_taken_over(unlatch, conf, asked):
    """An option of fdg silently became one of auxnet, by whose name it went as well."""
    conf.write_text(conf.read_text() + 'stages = 2\n[method]\nname = "fdg"\nweights = "stash"\naccumulate = 2\n')
    result = unlatch("train", conf, *asked, "--set", "method.store=[0]")
    assert result.exit_code == 0, result.output
    assert "note: petra means something else by weights: dropped what the settings say for fdg" in result.stdout
    assert re.search(r"PETRA\(microbatches=2, accumulate=2, .*\bweights='current',", result.stdout)


def test_an_option_that_the_other_method_lacks_is_dropped_with_a_word(unlatch, conf):
    conf.write_text(conf.read_text() + 'stages = 2\n[method]\nname = "fdg"\nshrink = 0.5\n')
    result = unlatch("train", conf, "--method", "auxnet")
    assert result.exit_code == 0, result.output
    assert "note: auxnet has no option shrink: dropped what the settings say for fdg" in result.stdout
    assert re.search(r"AuxNet\(.*\bbeta=1.0,", result.stdout)


def test_an_option_that_methods_share_is_taken_over(unlatch, conf):
    conf.write_text(conf.read_text() + 'stages = 2\n[method]\nname = "fdg"\nshrink = 0.5\npredict = "linear"\n')
    result = unlatch("train", conf, "--method", "dtrp")
    assert "note: " not in result.stdout
    assert "predict='linear', gamma=1.0, shrink=0.5" in result.stdout


def test_overrides_are_for_the_method_that_is_chosen(unlatch, conf):
    conf.write_text(conf.read_text() + 'stages = 2\n[method]\nname = "fdg"\nshrink = 0.5\n')
    result = unlatch("train", conf, "--method", "auxnet", "--set", "method.beta=2.0", "--set", "method.pull=3.0")
    assert result.exit_code == 0, result.output
    assert "note: auxnet means" not in result.stdout
    assert "beta=2.0, pull=3.0" in result.stdout
    result = unlatch("train", conf, "--method", "auxnet", "--set", "method.pul=3.0")
    assert result.exit_code == 2
    assert "Did you mean 'pull'?" in result.output


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_continued_run_is_the_run(unlatch, conf, tmp_path, epochs):
    unlatch("train", conf, "--epochs", 3, "--out", "whole", *CONSTANT)
    unlatch("train", conf, "--epochs", epochs, "--out", "parts", *CONSTANT)
    result = unlatch("train", "--resume", "parts", "--epochs", 3)
    assert result.exit_code == 0, result.output
    assert same_weights("whole", "parts")
    steps = [row["step"] for row in metrics.read("parts") if "train/loss" in row]
    assert steps == list(range(1, 19))


def test_the_latest_run_is_found_and_so_is_any_of_its_checkpoints(unlatch, conf, tmp_path):
    for name in ("old", "new"):
        flags = ("--epochs", 2, "--out", f"all/{name}", "--save-every", "3 batches", "--keep-last", 3)
        unlatch("train", conf, *flags, *CONSTANT)
    assert "no run with a checkpoint in runs/" in unlatch("train", "--resume", "latest").stderr
    result = unlatch("train", "--resume", "latest", "--out", "all", "--epochs", 3)
    assert result.exit_code == 0, result.output
    assert "continuing from all/new/checkpoints/step-00000012: step 12, 2 epochs complete" in result.stdout
    assert "balance" in result.stdout
    # From the middle, the end of what is left out included.
    result = unlatch("train", "--resume", "all/old/checkpoints/step-00000009", "--epochs", 3)
    assert result.exit_code == 0, result.output
    assert same_weights("all/old", "all/new")
    steps = [row["step"] for row in metrics.read("all/old") if "train/loss" in row]
    assert steps == list(range(1, 19))
    assert "--out is for a new run" in unlatch("train", "--resume", "all/old", "--out", "x").stderr


def test_a_checkpoint_asked_for_by_name_becomes_the_latest(unlatch, conf, tmp_path, monkeypatch):
    unlatch("train", conf, "--epochs", 2, "--out", "run", "--save-every", "3 batches", "--keep-last", 3)
    monkeypatch.setattr(Trainer, "fit", _fail)
    result = unlatch("train", "--resume", "run/checkpoints/step-00000006", "--epochs", 3)
    assert result.exit_code == 2
    kept = tmp_path / "run" / "checkpoints"
    assert (kept / "latest").resolve().name == "step-00000006"
    assert len(list(kept.glob("step-*"))) == 3


def _fail(*_, **__):
    raise ConfigError("training was not meant to begin")


def test_what_ends_before_it_trains_leaves_no_folder(unlatch, conf, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "fit", _fail)
    assert unlatch("train", conf, "--out", "run").exit_code == 2
    assert not (tmp_path / "run").exists()


def test_a_disk_without_room_is_found_out_before_training(unlatch, conf, tmp_path, monkeypatch):
    monkeypatch.setattr("unlatch.cli.training.shortage", lambda folder, needed, what: f"{folder}: no room for {what}")
    result = unlatch("train", conf, "--out", "run")
    assert result.exit_code == 2
    assert "run: no room for one checkpoint" in result.stderr
    assert not (tmp_path / "run").exists()


def test_the_best_checkpoints_stay(unlatch, conf, tmp_path):
    flags = ("--epochs", 4, "--out", "run", "--keep-last", 1, "--keep-best", 1, *CONSTANT)
    result = unlatch("train", conf, *flags)
    assert result.exit_code == 0, result.output
    accuracy = {r["step"]: r["eval/accuracy"] for r in metrics.read("run") if "eval/accuracy" in r}
    best = (tmp_path / "run" / "checkpoints" / "best").resolve()
    assert accuracy[int(best.name.removeprefix("step-"))] == max(accuracy.values())
    found = json.loads(unlatch("export", "run", "best.safetensors", "--best", "--json").stdout)
    assert found["checkpoint"].endswith(best.name)
    # A session that is not told to keep the best does not delete it.
    unlatch("train", "--resume", "run", "--epochs", 6, "--save-every", "1 batches", "--keep-last", 1)
    assert (tmp_path / "run" / "checkpoints" / "best").exists()
    assert "ends of epochs" in unlatch("train", conf, "--keep-best", 1, "--save-every", "5 batches").stderr


@pytest.mark.parametrize("asked", ["soon", "0.5 epochs", "-1"])
def test_intervals_that_are_none(unlatch, conf, asked):
    result = unlatch("train", conf, f"--save-every={asked}")
    assert result.exit_code == 2
    assert "expected" in result.stderr


def test_a_run_that_is_done_is_not_continued(unlatch, conf):
    unlatch("train", conf, "--out", "run")
    result = unlatch("train", "--resume", "run")
    assert result.exit_code == 2
    assert "raise --epochs" in result.stderr


def test_settings_of_the_last_continuation_count(unlatch, conf, tmp_path):
    unlatch("train", conf, "--out", "run", *CONSTANT)
    unlatch("train", "--resume", "run", "--epochs", 2, "--set", "optimizer.lr=0.01")
    assert config.load(tmp_path / "run" / "config-2.toml").optimizer.lr == 0.01
    result = unlatch("train", "--resume", "run", "--epochs", 3)
    assert result.exit_code == 0
    assert config.load(tmp_path / "run" / "config-3.toml").optimizer.lr == 0.01


def test_checkpoints_on_the_way_and_exact_methods_do_not_mind(unlatch, conf, tmp_path):
    unlatch("train", conf, "--epochs", 2, "--out", "one", *CONSTANT)
    unlatch("train", conf, "--epochs", 2, "--out", "two", "--save-every", 1, *CONSTANT)
    assert same_weights("one", "two")


def test_batch_compensation_reaches_the_end_of_its_learning_rate(unlatch, conf, tmp_path):
    flags = ("--set", "method.compensate=2", "--set", "method.microbatches=1")
    result = unlatch("train", conf, "--method", "dtrp", "--stages", 2, "--epochs", 2, "--out", "run", *flags)
    assert result.exit_code == 0, result.output
    saved = checkpoint.read(tmp_path / "run" / "checkpoints" / "latest")
    assert saved.state["loop"]["updates"] == 6
    [group] = unpacked(saved)["stations"][0]["stage"]["updater"]["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.0, abs=1e-12)


def test_gradients_are_probed(unlatch, conf, tmp_path):
    flags = ("--probe", "gradients", "--probe-every", 2, "--out", "run")
    result = unlatch("train", conf, "--method", "fdg", "--stages", 2, "--epochs", 2, *flags)
    assert result.exit_code == 0, result.output
    rows = [row for row in metrics.read("run") if "probe/update" in row]
    assert [row["probe/update"] for row in rows] == [0, 2, 4, 6, 8, 10]
    assert all(row["probe/stage0/forward/cosine"] == pytest.approx(1.0) for row in rows)
    assert rows[-1]["probe/stage0/current/cosine"] < 1.0
    assert (tmp_path / "run" / "probe.png").stat().st_size > 1000


def test_replicas_on_two_processes_write_the_run_that_one_writes(unlatch, conf, cut, tmp_path):
    flags = ("--method", "1f1b", *cut, "--replicas", 2)
    assert unlatch("train", conf, *flags, "--out", "one").exit_code == 0
    result = unlatch("train", conf, *flags, "--processes", 2, "--out", "two", "--json")
    assert result.exit_code == 0, result.output
    assert same_weights(tmp_path / "one", tmp_path / "two")
    stages = json.loads(result.stdout)["stages"]
    places = [(row["replica"], row["stage"], row["rank"]) for row in stages]
    assert places == [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)]
    refused = unlatch("train", conf, *flags, "--processes", 3)
    assert (refused.exit_code, "every replica needs equally many processes" in refused.stderr) == (2, True)


def test_two_processes_write_the_run_that_one_writes(unlatch, conf, cut, tmp_path):
    flags = ("--method", "dtrp", "--epochs", 2, *cut)
    unlatch("train", conf, *flags, "--out", "one")
    result = unlatch("train", conf, *flags, "--processes", 2, "--out", "two", "--json")
    assert result.exit_code == 0, result.output
    assert same_weights("one", "two")
    assert {stage["rank"] for stage in json.loads(result.stdout)["stages"]} == {0, 1}
    losses = [[row["train/loss"] for row in metrics.read(name) if "train/loss" in row] for name in ("one", "two")]
    assert losses[0] == losses[1]
    events = (tmp_path / "two" / "events.jsonl").read_text().splitlines()
    assert len(events) == len((tmp_path / "one" / "events.jsonl").read_text().splitlines())


def test_language_models_report_perplexity(unlatch, tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_text("".join(random.Random(0).choices("to be or not\n", k=3000)))
    conf = tmp_path / "text.toml"
    conf.write_text(
        """
        [model]
        name = "gpt"
        width = 16
        depth = 2
        heads = 2
        [data]
        name = "shakespeare"
        batch_size = 64
        options = {context = 16}
        [run]
        loss = "unlatch.models:next_token_loss"
        """
    )
    flags = ("--data-dir", tmp_path, "--stages", 2, "--epochs", 1, "--out", "run", "--json")
    result = unlatch("train", conf, "--method", "bp", *flags)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["evaluation"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-4)
    assert 0.0 < found["accuracy"] < 1.0
    assert metrics.read("run")[-1]["eval/perplexity"] == found["perplexity"]
