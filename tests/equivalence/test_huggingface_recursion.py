"""Models of `transformers` under delay: every delayed method follows the recursion, in float64, ties included."""

from __future__ import annotations

import pytest

from hf_models import batch_of, model_of
from recursions import follow_recursion
from unlatch.methods import get
from unlatch.nn.foreign import foreign
from unlatch.reference import SGD

pytest.importorskip("transformers")

DELAYED = ["pipedream", "ddg", "fr", "fdg", "adl", "dsp", "dtr"]
#: Two layers, no dropout: the recursion knows no random numbers.
SMALL = {
    "gpt2": {"n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"num_hidden_layers": 2},
    "bert": {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
#: Llama's norms compute in single precision, whatever they are given.
TOLERANCE = {"gpt2": 1e-14, "llama": 1e-8, "bert": 1e-14}


@pytest.mark.parametrize("method", DELAYED)
@pytest.mark.parametrize("family", SMALL)
def test_recursion(family, method):
    model = model_of(family, **SMALL[family])
    data = [foreign(model).taken_apart(batch_of(family, seed=number)) for number in range(6)]
    chosen = get(method, microbatches=1)
    loss_fn, tolerance = foreign(model).loss, TOLERANCE[family]
    follow_recursion(
        model, chosen, data, SGD(0.05, momentum=0.9), loss_fn=loss_fn, tolerance=tolerance, loss_tolerance=1e-6
    )
