"""The two hand-worked chains, and random ones for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from unlatch.plan.layer_costs import LayerCost

UNIT = [LayerCost(f"l{n}", 1, 1, 1, activation_bytes=100, weight_bytes=10) for n in range(4)]
MIXED = [LayerCost(f"l{n}", time, time, time) for n, time in enumerate((1, 2, 4, 3))]


def layers(most: int = 6, largest: int = 9, smallest: int = 1) -> st.SearchStrategy[list[LayerCost]]:
    """Chains with whole numbers as costs."""
    time, size = st.integers(smallest, largest), st.integers(0, 50)
    one = st.builds(LayerCost, st.just("layer"), time, time, time, size, size)
    return st.lists(one, min_size=1, max_size=most)
