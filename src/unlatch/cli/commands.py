"""Which commands there are, found without importing any of them; and what becomes of their errors."""

from __future__ import annotations

import errno
import signal
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import Interrupted, UnlatchError
from .console import Reported, exit_code, explain

__all__ = ["COMMANDS", "PAIRS", "Commands"]

#: In the order of `unlatch --help`, with the first line of each one's own help. A command is called like its module.
COMMANDS = {
    "init": "Write a settings file to begin with: it trains as it is.",
    "train": "Train a model and keep everything about it in a run folder.",
    "show": "Open a page that shows runs, finished or still training.",
    "compare": "Compare runs by accuracy, speed, bubble, staleness and memory.",
    "plan": "Place the work of a network on devices, or rank all methods.",
    "simulate": "Simulate methods: time, utilisation, staleness, memory, traffic.",
    "bench": "Measure how fast methods train, against backpropagation.",
    "check": "Check machine, model and method on a few small batches.",
    "export": "Write the model's weights as one file for plain PyTorch.",
    "methods": "List the methods, or show one in detail.",
}
#: Commands of two words, which the help of the first names. In the name of the module `_` stands between them.
PAIRS = ("bench throughput",)


class Commands(TyperGroup):
    """The commands, and Unlatch's own errors and the system's as messages; other errors keep their trace."""

    # Typer brings a click of its own, or uses the one that is installed: which types these are is not ours to say.
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Two words where these make a command: `bench` alone takes a file, which `./throughput` still can be called.
        together = " ".join(args[:2])
        return super().resolve_command(ctx, [together, *args[2:]] if together in PAIRS else args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in (*COMMANDS, *PAIRS):
            return None
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        alone.command(cmd_name)(import_module(f"{__package__}.{cmd_name.replace(' ', '_')}").command)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UnlatchError as error:
            if not isinstance(error, Reported):
                typer.echo(explain(error), err=True)
            raise typer.Exit(exit_code(error)) from None
        except OSError as error:
            # A pipe whose reader has left is typer's to close in silence; without words it is a defect.
            if error.errno in (None, errno.EPIPE) or error.strerror is None:
                raise
            typer.echo(f"error: {error.filename or 'a file or connection'}: {error.strerror}", err=True)
            raise typer.Exit(1) from None
        except (KeyboardInterrupt, Interrupted) as request:
            sys.stdout.flush()
            ended = request if isinstance(request, Interrupted) else Interrupted(signal.SIGINT)
            typer.echo("; ".join([str(ended), *getattr(request, "__notes__", [])]), err=True)
            raise typer.Exit(128 + ended.number) from None
