"""Files beside the weights: worth having, not worth ending a run for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

__all__ = ["optional_file"]

log = logging.getLogger(__name__)


@contextlib.contextmanager
def optional_file(path: str | Path) -> Iterator[Path]:
    """Give a name to write to; on leaving, what was written takes the place of `path`, whole.

    Where it cannot be written (a full disk, a folder that became read-only), an older file stays as it is and a warning
    is all that happens.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with optional_file(Path(root) / "summary.json") as draft:
    ...         _ = draft.write_text("{}")
    ...     [file.name for file in Path(root).iterdir()]
    ['summary.json']
    """
    path = Path(path)
    # The ending stays: it says in which format a figure is written.
    draft = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        yield draft
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        log.warning("%s was not written: %s", path, error.strerror or error)
