"""Metrics for TensorBoard, for those who have it (`pip install unlatch[tensorboard]`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = ["TensorBoard"]


class TensorBoard:
    """A `Logger` that writes event files into a folder."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard is not installed; pip install 'unlatch[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(folder))

    def config(self, settings: Mapping[str, Any]) -> None:
        """Show the settings as text."""
        self._writer.add_text("config", f"```json\n{json.dumps(settings, indent=1, default=str)}\n```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to the curve of each name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
