"""Tests on ranks share them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient_launcher(patient_launcher: None) -> None:
    """All tests here want the cause, not the first echo."""
