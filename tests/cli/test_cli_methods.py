"""`unlatch methods`: the published timetable to the letter, and something true about every method."""

from __future__ import annotations

import json

import pytest

from unlatch import methods

DTR_3 = """\
| tick | module 1 | module 2 | module 3 |
|---|---|---|---|
| 1 | fw b1 W2 | - | - |
| 2 | fw b2 W3 | fw b1 W2 | - |
| 3 | fw b3 W4 | fw b2 W3 | fb b1 W1 |
| 4 | fw b4 W5 | re b1 W3; fw b3 W4 | fb b2 W2 |
| 5 | re b1 W5; fw b5 W6 | re b2 W4; fw b4 W5 | fb b3 W3 |
| 6 | re b2 W6; fw b6 W7 | re b3 W5; fw b5 W6 | fb b4 W4 |
"""


def test_the_timetable_of_dtr(unlatch):
    result = unlatch("methods", "dtr", "--stages", 3)
    assert result.exit_code == 0
    assert f"\n{DTR_3}\n" in result.stdout


def test_the_table_has_every_method(unlatch):
    result = unlatch("methods")
    first = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert set(methods.names()) <= set(first)


def test_the_catalogue_as_json(unlatch):
    found = {one["name"]: one for one in json.loads(unlatch("methods", "--stages", 3, "--json").stdout)}
    assert found["bp"]["gradient"] == "exact"
    assert found["dgl"]["gradient"] == "local"
    assert found["fdg"]["gradient"] == "late"
    assert found["fdg"]["lateness"] == 3
    assert found["pipedream-2bw"]["staleness"] == 1.0
    assert found["dtr"]["weight_copies"] == 0 < found["pipedream"]["weight_copies"]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", methods.names())
def test_every_method_can_be_shown(unlatch, name, stages):
    result = unlatch("methods", name, "--stages", stages)
    assert result.exit_code == 0, result.output
    assert "microbatches = 'auto'" in result.stdout
    details = json.loads(unlatch("methods", name, "--stages", stages, "--json").stdout)
    assert len(details["staleness"]) == len(details["in_flight"]) == stages
    assert all(option["text"] for option in details["options"].values())


def test_choices_are_shown(unlatch):
    assert "[ticked | 1f1b]" in unlatch("methods", "petra").stdout
    details = json.loads(unlatch("methods", "petra", "--json").stdout)
    assert details["options"]["order"]["choices"] == ["ticked", "1f1b"]


def test_flushed_methods_have_a_chart(unlatch):
    result = unlatch("methods", "1f1b", "--stages", 2, "--microbatches", 3)
    assert "stage 0 | F0 F1 .  .  B0 =  F2 B1 =  .  B2 =" in result.stdout


def test_delay_without_care_is_warned_of(unlatch):
    bad = unlatch("methods", "fdg", "--stages", 4, "--microbatches", 1, "--no-nesterov").stdout
    assert "a large loss of accuracy is likely" in bad
    assert "unlatch.methods.FDG(microbatches=8)" in bad
    assert "as flags: --set method.microbatches=8\n" in bad
    good = unlatch("methods", "fdg", "--stages", 4, "--microbatches", 4).stdout
    assert "likely" not in good
    assert "\n            4  " in good


def test_without_momentum(unlatch):
    assert unlatch("methods", "dtr", "--stages", 2, "--momentum", 0.0).exit_code == 0


AUXNET_2 = """\
| tick | module 1 | module 2 |
|---|---|---|
| 1 | fw b1 W1; S b1 W1; bw b1 W1 | P b1 W1; fw b1 W1; bw b1 W1; C b1 W2 |
| 2 | fw b2 W2; S b2 W2; bw b2 W2 | P b2 W2; fw b2 W2; bw b2 W2; C b2 W3 |
"""
LAYERPIPE_2 = """\
| slot | device 0 | device 1 |
|---|---|---|
| 0 | 0F0 | - |
| 1 | 0F1 | 1F0 1I0 1W0 |
| 2 | 0F2 2I0 0W0 | 1F1 1I1 1W1 |
"""


def test_stages_that_start_at_once_have_a_timetable_and_a_picture(unlatch):
    shown = unlatch("methods", "auxnet", "--stages", 2, "--ticks", 2).stdout
    assert f"\n{AUXNET_2}\n" in shown
    assert "\nstage 0 | F0 B0 =  .  .  F1" in shown
    assert "\nstage 1 | P0 F0 B0 =  C0 P1" in shown


def test_tasks_have_a_table_of_slots_and_a_picture(unlatch):
    shown = unlatch("methods", "layerpipe", "--stages", 2, "--ticks", 3).stdout
    assert f"\n{LAYERPIPE_2}\n" in shown
    assert "\ndevice 0 | 0F0 0F1" in shown


def test_local_methods_get_no_verdict_from_a_theory_of_delay(unlatch):
    shown = unlatch("methods", "auxnet", "--stages", 4).stdout
    assert "no advice: auxnet learns from local losses" in shown
    assert "no gradient is late" not in shown
