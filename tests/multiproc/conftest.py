"""Tests on ranks share them."""

from __future__ import annotations

import pytest

from rank_pools import in_one_worker


@pytest.fixture(autouse=True)
def _patient_launcher(patient_launcher: None) -> None:
    """All tests here want the cause, not the first echo."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    in_one_worker(items, "multiproc")
