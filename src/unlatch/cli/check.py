"""`unlatch check`: which promises hold on this machine, for this model, with this method."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .console import emit_json, people

__all__ = ["command"]

_BUILT_IN = ["model.name=resnet8", "method.name=dtr", "run.stages=2"]
_STYLES = {"ok": "green", "differs": "bold red", "not applicable": "dim"}


def command(
    conf: Annotated[
        Path | None, typer.Argument(metavar="CONF.toml", help="Settings; a small built-in network if left out.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Another method than the file's.")] = None,
    stages: Annotated[int | None, typer.Option(help="Stages that the model is cut into.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override any setting; repeatable.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data are; also UNLATCH_DATA.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Check and time training there (auto, cpu, cuda, cuda:1), and print a report for an issue."),
    ] = None,
    faults: Annotated[
        bool, typer.Option("--faults", help="Instead: break two processes with a small network, in many ways.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Check machine, model and method on a few small batches.

    \b
    unlatch check
    unlatch check conf.toml
    unlatch check conf.toml --method petra --stages 4
    unlatch check --device cuda
    unlatch check --faults

    The batches are of your own data. Every line says ok, differs (how much) or not applicable (why). The exit code is 1
    if something differs, or if a fault does not end as it should.
    """
    from ..nn.device import check_device
    from .checks import findings_about
    from .settings import read_settings

    if faults:
        if conf is not None or method or stages or overrides or data_dir or device:
            raise ConfigError("--faults tries a small network of its own: leave out CONF.toml and all settings")
        _try_faults(as_json)
        return
    given = [*(_BUILT_IN if conf is None else []), *(overrides or [])]
    # Compiled code rounds in its own way, and what is checked holds bit for bit.
    given.append("run.compile=false")
    config, notes = read_settings(conf, given, method=method, data_dir=data_dir, stages=stages, device=device)
    check_device(config.run.device)
    console = people(as_json)
    for note in notes:
        console.print(f"note: {note}")
    findings = []
    for finding in findings_about(config, on_device=device is not None):
        findings.append(finding)
        if not as_json:
            console.print(f"{finding.verdict:<15}", style=_STYLES[finding.verdict], end="")
            console.print(f"{finding.check:<20}{finding.text}")
    bad = [finding for finding in findings if finding.verdict == "differs"]
    if as_json:
        emit_json({"ok": not bad, "findings": [asdict(finding) for finding in findings]})
    elif device is not None:
        from .checks.device import report

        console.print("\nReport, to paste into an issue:\n")
        typer.echo(report(config, findings))
    else:
        console.print(
            "everything that applies holds" if not bad else f"{len(bad)} of {len(findings)} checks do not hold"
        )
    if bad:
        raise typer.Exit(1)


def _try_faults(as_json: bool) -> None:
    from ..table import Table, number_text
    from .checks.faults import ordeals, undergo

    outcomes, console = [], people(as_json)
    for outcome in undergo(ordeals()):
        outcomes.append(outcome)
        console.print(f"{len(outcomes):>2} {outcome.injected}", style="dim")
    bad = [outcome for outcome in outcomes if not outcome.expected]
    if as_json:
        emit_json({"ok": not bad, "faults": [asdict(outcome) for outcome in outcomes]})
    else:
        rows = tuple((o.fault, o.injected, number_text(o.seconds, ".2f"), o.outcome) for o in outcomes)
        console.print(Table(("fault", "injected", "detected in (s)", "outcome"), rows, left=(0, 1, 3)).text())
        for outcome in bad:
            console.print(f"not as expected: {outcome.injected}", style="bold red")
        if not bad:
            console.print("every fault ended as it should")
    if bad:
        raise typer.Exit(1)
