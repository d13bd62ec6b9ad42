"""Help comes at once and whole: no heavy package is imported for it, no line is cut off, choices are shown."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from scripts import environment
from unlatch.cli.commands import COMMANDS
from unlatch.plan.networks import network_names

HEAVY = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "jinja2", "safetensors")
LOOK = f"""
import json, sys
from unlatch.cli import app
for command in {[[], *([command] for command in COMMANDS)]}:
    sys.argv = ["unlatch", *command, "--help"]
    try:
        app()
    except SystemExit as ended:
        assert not ended.code
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""


def test_no_help_imports_a_heavy_package():
    done = subprocess.run([sys.executable, "-c", LOOK], env=environment(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_the_root_help_has_every_line_whole(unlatch, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = unlatch("--help").stdout
    for command, line in COMMANDS.items():
        assert f"\n  {command:<8}  {line}\n" in shown
    assert "Exit codes: 0 all well" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_line_of_a_command_is_the_first_of_its_own_help(unlatch, command):
    documented = importlib.import_module(f"unlatch.cli.{command}").command.__doc__
    assert documented.splitlines()[0] == COMMANDS[command]
    assert f"\n  {COMMANDS[command]}\n" in unlatch(command, "--help").stdout


@pytest.mark.parametrize(
    ("command", "flag", "choices"),
    [
        ("plan", "--network", "|".join(network_names())),
        ("simulate", "--network", "|".join(network_names())),
        ("plan", "--mode", "divisible|atomic|factor"),
        ("plan", "--placement", "row|list|exact"),
        ("plan", "--cost-model", "measured|mac|systolic"),
        ("simulate", "--cost-model", "measured|mac|systolic"),
        ("train", "--probe", "gradients"),
    ],
)
def test_choices_are_shown_and_held(unlatch, command, flag, choices):
    assert f"{flag} <{choices}>" in unlatch(command, "--help").stdout
    refused = unlatch(command, flag, "nothing-of-the-kind")
    assert refused.exit_code == 2
    assert all(f"'{choice}'" in refused.stderr for choice in choices.split("|"))
