"""Scripts of `docs/`, which belong to no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def docs_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As when it is run: scripts find those beside them.
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    spec.loader.exec_module(module)
    return module
