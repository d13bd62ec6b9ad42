"""What every test shares: one intra-op thread, fixed seeds, hypothesis without deadlines, and ranks for who asks."""

from __future__ import annotations

import os
import random

import hypothesis
import numpy as np
import pytest
import torch

from rank_pools import cold_start, greenhouse, patient_launcher, ranks1, ranks2, ranks4

__all__ = ["cold_start", "greenhouse", "patient_launcher", "ranks1", "ranks2", "ranks4", "seed"]

torch.set_num_threads(1)

# Deadlines and the check for slow generation measure the machine, not the code; a failure in CI must be repeatable.
SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("local", deadline=None, suppress_health_check=SLOW, print_blob=True)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("local"), derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes is left to `make faults`."""
    if os.environ.get("UNLATCH_TEST_FAULTS") != "all":
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="part of `make faults`"))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start every test from the same random state, and hand out the seed for generators of its own."""
    value = 1234
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value
