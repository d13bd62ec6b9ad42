"""Scripts of `docs/` and the modules beside them, which are not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def docs_script(name: str) -> Any:
    # As when it is run: scripts find those beside them.
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module(name)
