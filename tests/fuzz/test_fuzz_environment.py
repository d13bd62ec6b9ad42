"""What a launcher says in the environment, of any content."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing import cases, outcome, texts
from unlatch.errors import ConfigError
from unlatch.transport.meeting import place, start_limit
from unlatch.transport.store import store_address

words = st.one_of(texts.filter(lambda text: "\0" not in text), st.integers(-3, 70000).map(str))


@cases(200)
@given(words, words, words, words)
@example("\u0663", "\u0664", "\u0665", "\u0666")
@example("1" * 5000, "2" * 5000, "3" * 5000, "4" * 5000)
@example("2", "2", "65536", "nan")
def test_places_and_ports(rank, size, port, limit):
    with pytest.MonkeyPatch.context() as environment:
        for name, text in {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, "UNLATCH_START_LIMIT": limit}.items():
            environment.setenv(name, text.encode("utf-8", "replace").decode())
        environment.setenv("MASTER_ADDR", "localhost")
        found = outcome(place)
        assert isinstance(found, ConfigError) or 0 <= found[0] < found[1]
        address = store_address()
        assert address is None or 0 <= address[1] < 2**16
        assert isinstance(outcome(start_limit), ConfigError | float)
