"""The command line: one module per command, each with a function `command` that typer turns into flags and help.

A command's module is imported when it is asked for, and what does its work when it runs, so that help comes at once.
Read `train` first: `settings` reads the file and the flags, `training` decides where to train, `continuing` finds the
run to go on with, `prepare` makes every open choice, `session` trains on each rank. `ranks` says who started them,
`stopping` looks for the file that asks a run to stop, `progress` shows how far it is. `cost_flags`, `planning` and
`placing` serve `plan` and `simulate`, `catalogue` and `method_pages` serve `methods`, `speeds` `bench`, `throughputs`
`bench_throughput`, `checks` `check`, `study` `compare` where it is given a study; `show` serves the page of
`unlatch.live`; `console` is where all text goes.
No module here names a method: what it must know of one it asks through the hooks of `unlatch.methods.base.Method`.
"""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from ..transport.signals import REQUESTS, interrupt
from .commands import Commands

__all__ = ["app", "main"]

app = typer.Typer(
    name="unlatch",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models with methods that open the locks of backpropagation.

    Exit codes: 0 all well, 1 a run or a check failed, 2 the settings or the usage are wrong, 130 interrupted,
    143 terminated.
    """


def main() -> None:
    """Run the command that was asked for."""
    for number in REQUESTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        app()
    finally:
        # All is done and said: a request that comes twice must not change the exit code.
        for number in REQUESTS:
            signal.signal(number, signal.SIG_IGN)
