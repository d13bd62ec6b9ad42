"""Functions, results and errors on their way between a launcher and its ranks.

What both sides can import travels by name. What only one of them has, because it was defined in a notebook, on standard
input or inside of a function, travels by value, which takes cloudpickle.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = ["pack", "starting_interpreters", "survives"]


def pack(what: Any) -> bytes:
    """As bytes that `Connection.recv` or `pickle.loads` turn into the same thing elsewhere.

    >>> pickle.loads(pack((len, "abc"))), pickle.loads(pack(lambda x: x + 1))(2)
    ((<built-in function len>, 'abc'), 3)
    """
    try:
        by_name = bytes(ForkingPickler.dumps(what))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = str(error).splitlines()[0]
    else:
        if _main_is_a_file() or b"__main__" not in by_name:
            return by_name
        why = "it is defined in a notebook or an interactive session"
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError(
            f"another process cannot import this: {why}. Install the extra unlatch[notebook] (cloudpickle), with which "
            "it travels as it is, or define it at the top level of a module"
        ) from None
    try:
        found: bytes = cloudpickle.dumps(what)
    except Exception as error:
        raise ConfigError(f"this cannot travel to another process: {error}") from error
    return found


def survives(what: Any) -> bool:
    """Whether `what` can travel and be read again.

    >>> import threading
    >>> survives(ValueError("text")), survives(threading.Lock())
    (True, False)
    """
    try:
        pickle.loads(pack(what))
    except Exception:
        return False
    return True


@contextmanager
def starting_interpreters(*, main: bool = True) -> Iterator[None]:
    """Inside, a fresh interpreter does not look for the file of a main module that has none, as on standard input.

    **Arguments:** `main`: `False` has it do without the main module in any case.
    """
    namespace = vars(sys.modules["__main__"])
    hidden = [] if main and _main_is_a_file() else ["__file__"] if main else ["__file__", "__spec__"]
    before = {name: namespace[name] for name in hidden if name in namespace}
    namespace.update(dict.fromkeys(before))
    try:
        yield
    finally:
        namespace.update(before)


def _main_is_a_file() -> bool:
    """Whether a fresh interpreter can have the main module as well."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or Path(getattr(main, "__file__", None) or "").is_file()
