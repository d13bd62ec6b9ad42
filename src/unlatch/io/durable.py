"""Folders that appear whole or not at all, whatever happens while they are written.

    1. write into .name.tmp-XXXX     3. rename an old `name` to .name.old     5. delete .name.old
    2. flush it to disk              4. rename the new one to `name`

A rename is the only atomic step a POSIX file system offers, and it cannot replace a folder that has files in it. So
between 3 and 4 the old folder has another name; `current` knows it, and the next `replaced` puts it right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["current", "replaced", "sync", "tidy", "write_text"]


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give an empty folder to write into; on leaving without an error it takes the place of `path`.

    After an error, or a crash at any moment, `current(path)` is the old folder with its content untouched, or the
    complete new one. One writer per path at a time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with replaced(Path(root) / "a") as folder:
    ...         _ = (folder / "x").write_text("1")
    ...     sorted(p.name for p in Path(root).glob("**/*"))
    ['a', 'x']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tidy(path)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-", dir=path.parent))
    try:
        with _locked(temporary):
            yield temporary
            sync(temporary)
            _swap(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def current(path: Path) -> Path:
    """Where the folder `path` is now: in its place, or aside if a writer was killed between two renames."""
    aside = _aside(path)
    return aside if not path.exists() and aside.exists() else path


def write_text(file: Path, text: str) -> None:
    """Write a small file whole: whoever reads it sees the old text or the new one."""
    draft = file.with_name(f".{file.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    _sync_one(draft)
    os.replace(draft, file)


def sync(folder: Path, *, files: bool = True) -> None:
    """Flush the files of a folder and the folder itself to disk."""
    for file in sorted(p for p in folder.iterdir() if p.is_file()) if files else ():
        _sync_one(file)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _swap(temporary: Path, path: Path) -> None:
    # mkdtemp makes folders that only their owner can read; a result is as readable as any other new folder.
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o777 & ~mask)
    aside = _aside(path)
    if path.exists():
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if aside.exists():
            os.rename(aside, path)
        raise
    _sync_one(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def tidy(path: Path) -> None:
    """Undo what a killed writer left: an old folder moved aside, temporary folders that nobody holds."""
    aside = _aside(path)
    if aside.exists():
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(aside, path)
    for stale in path.parent.glob(f".{_literal(path.name)}.tmp-*"):
        with contextlib.suppress(OSError), _locked(stale):
            shutil.rmtree(stale, ignore_errors=True)


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold `folder`; the system lets go when the process dies, which is how a stale folder is told from a live one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
