"""Models of `transformers` on two ranks, under every method: what one process computes, and back into the library."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import hf_jobs
import unlatch
from hf_models import batch_of, hf, model_of
from rank_jobs import differences
from unlatch.methods import get
from unlatch.methods.auxnet.border import BorderMethod

pytest.importorskip("transformers")

METHODS = unlatch.methods.names()
#: What passes a border is predicted, so only one tensor may.
PREDICTED = [name for name in METHODS if isinstance(get(name), BorderMethod)]
FAMILIES = ["gpt2", "llama", "bert"]
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM"}


@cache
def inline(family, method, plain):
    return hf_jobs.train_hf(family, method, 2, plain)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_one_process_computes(ranks2, family, method):
    plain = method in PREDICTED
    expected = inline(family, method, plain)
    outcomes = ranks2.run(hf_jobs.train_hf, family, method, 2, plain)
    if isinstance(expected, str):
        assert method == "petra"
        assert outcomes == [expected] * 2
        assert "no block below the last stage is reversible" in expected
        assert "reversible transformers" in expected
    else:
        assert [differences(expected, outcome) for outcome in outcomes] == [[], []]


@pytest.mark.parametrize("method", PREDICTED)
def test_methods_that_predict_inputs_refuse_what_is_more_than_one_tensor(method):
    said = hf_jobs.train_hf("gpt2", method, 2, False)
    assert f"{method} predicts what stage 1 (block 'transformer.h." in said
    assert "the weight 'transformer.wte.weight' of an earlier stage" in said


@cache
def backpropagation(family):
    return hf_jobs.train_hf(family, "bp", 1, False)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "petra"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_stage_is_backpropagation(family, method):
    one, other = hf_jobs.train_hf(family, method, 1, False), backpropagation(family)
    # Micro-batches draw dropout masks of their own; Llama's norms compute in single precision.
    if get(method).microbatches == 1 and get(method).accumulate == 1:
        assert [loss for *_, loss in one["steps"]] == pytest.approx([loss for *_, loss in other["steps"]], rel=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_goes_back_into_the_library(ranks2, family, tmp_path):
    outcome, _ = ranks2.run(hf_jobs.train_hf, family, "bp", 2, False, str(tmp_path / "last"))
    model_of(family).config.save_pretrained(tmp_path / "last")
    model = hf(CLASSES[family]).from_pretrained(tmp_path / "last", dtype=torch.float64)
    assert list(model.state_dict()) == list(outcome["state"])
    for name, t in model.state_dict().items():
        assert torch.equal(t, outcome["state"][name]), name
    tied = family != "llama"
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_a_checkpoint_continues_on_ranks_and_inline_alike(ranks2, tmp_path):
    ranks2.run(hf_jobs.train_hf, "gpt2", "dtr", 2, False, str(tmp_path / "last"))
    expected = hf_jobs.resume_hf("gpt2", "dtr", str(tmp_path / "last"))
    assert ranks2.run(hf_jobs.resume_hf, "gpt2", "dtr", str(tmp_path / "last")) == [expected] * 2


def test_trained_weights_have_their_names_once(tmp_path):
    from safetensors import safe_open

    outcome = hf_jobs.train_hf("gpt2", "bp", 2, False, str(tmp_path / "last"))
    with safe_open(tmp_path / "last" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert names == set(outcome["state"]) - {"lm_head.weight"}


def test_the_first_batch_shows_on_ranks_what_blocks_do_not_compute(ranks2):
    first, _ = ranks2.run(hf_jobs.refuse_more_than_blocks)
    assert "LlamaForCausalLM.forward and the composition of its blocks() differ" in first


def test_the_batch_used_here_differs_in_length():
    counts = [(batch_of("gpt2", size=6, padding="right")["labels"][rows] != -100).sum() for rows in ([0, 1], [2, 3])]
    assert counts[0] != counts[1]
