"""Can the model be trained in stages at all: every parameter in one block, nothing shared or skipped across a cut."""

from __future__ import annotations

from ...nn.chain import chain
from ...nn.inverse_check import check_reversible
from .finding import Inapplicable
from .trial import Trial

__all__ = ["inverses", "sound_chain"]


def sound_chain(trial: Trial) -> str:
    """The model was cut and checked when the run was prepared; say what was found."""
    model, plan = trial.model(), trial.prepared.plan
    parameters = sum(p.numel() for p in model.parameters())
    cut = "in one stage" if len(plan.starts) == 1 else f"cut into {len(plan.starts)} stages before {_cuts(plan.stages)}"
    return (
        f"{len(plan.blocks)} blocks hold all {parameters:,} parameters once, {cut}; they compose to the model, and "
        "no weight, module or tensor crosses a cut by another way"
    )


def _cuts(stages: tuple[tuple[str, ...], ...]) -> str:
    return ", ".join(f"'{names[0]}'" for names in stages[1:])


def inverses(trial: Trial) -> str:
    """Blocks that declare an inverse have one."""
    if not trial.method.inverts:
        raise Inapplicable(f"{trial.method.name} inverts nothing")
    errors = check_reversible(trial.model(), trial.batches()[0][0])
    total = len(chain(trial.model()))
    if not errors:
        raise Inapplicable(f"none of the {total} blocks is reversible, so every stage keeps its inputs, as dsp does")
    worst = max(errors, key=lambda name: errors[name])
    return (
        f"{len(errors)} of {total} blocks are reversible; inverse(forward(x)) is off by at most {errors[worst]:.1e} "
        f"(relative, block '{worst}')"
    )
