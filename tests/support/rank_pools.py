"""Ranks that live as long as the test session, and how ranks are started in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import unlatch
from greenhouse import Greenhouse
from unlatch.transport import launch, nursery

IN_EARNEST = nursery._fresh_interpreter


class Pool:
    """A fixed number of ranks, started when first used and again after a test has broken them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: unlatch.Ranks | None = None

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Run a job on every rank and return its results by rank."""
        if self._ranks is None:
            self._ranks = unlatch.Ranks(self.size)
        try:
            return self._ranks.run(job, *args, timeout=timeout)
        except BaseException:
            self.close(force=True)
            raise

    @property
    def port(self) -> int:
        """Of the store that these ranks meet at, once they run."""
        assert self._ranks is not None
        return int(self._ranks._store.port)

    def close(self, *, force: bool = False) -> None:
        if self._ranks is not None:
            self._ranks.close(force=force)
        self._ranks = None


@pytest.fixture(scope="session", autouse=True)
def greenhouse() -> Iterator[Greenhouse]:
    """All ranks that tests start in this process come from here."""
    with pytest.MonkeyPatch.context() as patch:
        growing = Greenhouse()
        patch.setattr(nursery, "_fresh_interpreter", growing.interpreter)
        yield growing
        growing.close()


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except those of a test that is about the start."""
    monkeypatch.setattr(nursery, "_fresh_interpreter", IN_EARNEST)


def _pool(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks1() -> Iterator[Pool]:
    yield from _pool(1)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Pool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Pool]:
    yield from _pool(4)


@pytest.fixture
def patient_launcher(monkeypatch: pytest.MonkeyPatch, greenhouse: Greenhouse) -> None:
    """The launcher hears out all ranks, however long a busy machine takes: the cause may come after its echoes."""
    # Before a test counts children.
    greenhouse.start()
    monkeypatch.setattr(launch, "_GRACE", 100.0)
