"""JSON files that people write or edit: whatever is wrong with one is said in words, with its name and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UnlatchError

__all__ = ["read_json"]


def read_json(path: str | Path, what: str, wrong: type[UnlatchError]) -> Any:
    """What a JSON file holds.

    **Arguments:** `what`: how errors call the file, such as `"costs file"`; `wrong`: the kind of error.

    >>> from ..errors import PlanError
    >>> read_json("absent.json", "costs file", PlanError)
    Traceback (most recent call last):
        ...
    unlatch.errors.PlanError: cannot read the costs file absent.json: No such file or directory
    """
    try:
        # Editors on some systems begin UTF-8 files with a mark that JSON does not know.
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(f"the {what} {path} is not a text file in UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise wrong(f"cannot read the {what} {path}: {reason}") from None
    if not text.strip():
        raise wrong(f"the {what} {path} is empty")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut_off = " (is the end missing?)" if error.pos >= len(text.rstrip()) else ""
        where = f"line {error.lineno}, column {error.colno}"
        raise wrong(f"the {what} {path} is not JSON: {error.msg} in {where}{cut_off}") from None
    except RecursionError:
        raise wrong(f"the {what} {path} is nested too deeply to be one") from None
    except ValueError:
        raise wrong(f"the {what} {path} holds a number with thousands of digits") from None
