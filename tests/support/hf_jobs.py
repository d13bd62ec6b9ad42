"""What tests of models from elsewhere run on ranks, and inline."""

from __future__ import annotations

from typing import Any

import torch

import unlatch
from hf_models import batch_of, model_of, sgd
from rank_jobs import Outcome, copied_state
from unlatch.errors import UnlatchError

#: Where the second of two stages starts.
MIDDLE = {"gpt2": "transformer.h.2", "llama": "model.layers.2", "bert": "bert.encoder.layer.2"}


def train_hf(family: str, method: str, stages: int, plain: bool, path: str | None = None) -> Outcome | str:
    """Train a model as it comes: with dropout, its own loss, and tied weights where the family ties.

    **Arguments:**

    - `plain`: without padding and ties, so that one tensor passes between stages.
    - `path`: of a checkpoint to write when the last batch has been fed.

    **Returns:** all that must not depend on where it ran, or why it does not run at all.
    """
    data = [batch_of(family, size=6, seed=number, padding=None if plain else "right") for number in range(3)]
    if not plain:
        # Collators pad to the longest sample of a batch.
        data[1] = {name: t[:, :6] for name, t in data[1].items()}
    model = model_of(family, tie_word_embeddings=family != "llama" and not plain)
    split = [MIDDLE[family]] if stages == 2 else []
    try:
        with unlatch.parallelize(
            model, method, stages=stages, optimizer=sgd, split=split, sample=data[0], seed=3
        ) as run:
            steps = [run.step(batch) for batch in data]
            if path is not None:
                run.save(path)
            steps += run.flush()
            evaluation = run.evaluate(data[:1])
            state = copied_state(run.module())
    except UnlatchError as error:
        return str(error)
    return {"steps": [(s.step, s.batch, s.loss) for s in steps], "evaluation": evaluation, "state": state}


def resume_hf(family: str, method: str, path: str) -> list[float | None]:
    """Losses after a checkpoint was loaded."""
    split = [MIDDLE[family]]
    with unlatch.parallelize(model_of(family, seed=5), method, stages=2, optimizer=sgd, split=split, seed=3) as run:
        run.load(path)
        return [result.loss for result in [run.step(batch_of(family, size=6, seed=7)), *run.flush()]]


def refuse_more_than_blocks() -> str:
    """What a rank says of a model that does more than its layers."""
    model: Any = model_of("llama")
    forward = model.forward

    def scaled(*args: Any, **named: Any) -> Any:
        found = forward(*args, **named)
        found.logits = torch.tanh(found.logits)
        return found

    model.forward = scaled
    with unlatch.parallelize(model, stages=2, optimizer=sgd, split=[MIDDLE["llama"]]) as run:
        try:
            run.step(batch_of("llama"))
            run.flush()
        except UnlatchError as error:
            return str(error)
    return "was trained"
