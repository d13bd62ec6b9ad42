"""Two ranks with a device that is not there; the ranks of other tests must never meet it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rank_pools import Pool


@pytest.fixture(scope="package")
def ranks_with_devices() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()
