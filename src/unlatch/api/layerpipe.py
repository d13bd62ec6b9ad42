"""Executors for LayerPipe: stages with late weight gradients, or tasks placed by the planner."""

from __future__ import annotations

import math

from ..methods import LayerPipe
from ..runtime.engine import Engine
from ..runtime.mail import Mail
from .build import Blueprint, build_staged, builder_for

__all__ = ["build_layerpipe"]


@builder_for(LayerPipe)
def build_layerpipe(blueprint: Blueprint, mail: Mail) -> Engine:
    """The executor of one rank."""
    method = blueprint.method
    assert isinstance(method, LayerPipe)
    parts = blueprint.parts * method.accumulate
    # The moving average stands in for the weights of the input gradient, which is not late by g.
    reach = [math.ceil((gap - method.g) / parts) for gap in method.gaps(len(blueprint.plan.starts))]
    return build_staged(blueprint, mail, reach)
