"""The command line as a function in this process: text in, exit code and text out."""

from __future__ import annotations

import torch
from click.testing import Result
from typer.testing import CliRunner

from unlatch.cli import app


def invoke(*arguments: object) -> Result:
    """Run a command; threads are put back, since runs set them."""
    threads = torch.get_num_threads()
    try:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
