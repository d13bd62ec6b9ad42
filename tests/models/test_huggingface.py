"""Models of `transformers` as they are: the same outputs, losses and gradients, whatever the family and the batch."""

from __future__ import annotations

import copy
from collections import UserDict

import pytest
import torch

import unlatch
from hf_models import FAMILIES, SHAPE, TOKENS, batch_of, gpt2, hf, model_of, sgd
from unlatch.errors import ConfigError, DataError, PlanError
from unlatch.metrics import accuracy, perplexity
from unlatch.nn import chain, state_names
from unlatch.nn.foreign import foreign

pytest.importorskip("transformers")

#: Weights of embedding and head are tensors of their own, whatever the family likes.
UNTIED = {"tie_word_embeddings": False}
CAUSAL = ["gpt2", "llama", "qwen2", "qwen3", "smollm3"]


def composed(model, x):
    for block in chain(model):
        x = block.module(x)
    return x


def close(one, other, tolerance=1e-12):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_compute_what_the_model_computes(family, attention, padding):
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("the library has no such attention for it")
    if family == "vit" and padding is not None:
        pytest.skip("images are not padded")
    model = model_of(family, attn_implementation=attention).eval()
    if attention == "eager" and padding is not None:
        # Their softmax is in single precision, where a mask made for double precision is minus infinity.
        model = model.float()
    own = foreign(model)
    batch = batch_of(family, padding=padding)
    x, y = own.taken_apart(batch)
    output = composed(model, x)
    expected = model(**batch)
    close(output, expected.logits, 1e-12 if output.dtype == torch.float64 else 1e-5)
    total, count = own.loss(output, y)
    # The library computes most of its losses in single precision.
    close((total / count).float(), expected.loss.float(), 1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_positions_in_the_batch_are_kept_to(family):
    model = model_of(family).eval()
    batch = batch_of(family)
    batch["position_ids"] = torch.arange(8)[None] + 3
    x, _ = foreign(model).taken_apart(batch)
    close(composed(model, x), model(**batch).logits)
    del batch["position_ids"]
    if family != "llama":  # rotations know differences of positions only
        assert (composed(model, x) - model(**batch).logits).abs().max() > 1e-3


def test_positions_that_all_samples_share_are_cut_into_micro_batches():
    batch = {**batch_of("gpt2"), "position_ids": torch.arange(8)[None] + 3}
    losses = []
    for method in ("bp", unlatch.methods.get("gpipe", microbatches=4)):
        run = unlatch.parallelize(without_dropout(model_of("gpt2")), method, stages=2, optimizer=sgd)
        losses.append([run.step(batch).loss for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_token_types_are_kept_to():
    model = model_of("bert").eval()
    batch = {**batch_of("bert", padding="right"), "token_type_ids": torch.randint(2, (4, 8))}
    x, _ = foreign(model).taken_apart(batch)
    close(composed(model, x), model(**batch).logits)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_decoders_classify_the_last_token_that_is_no_padding(family):
    head = {"gpt2": "GPT2ForSequenceClassification", "llama": "LlamaForSequenceClassification"}[family]
    torch.manual_seed(0)
    model = hf(head)(copy.deepcopy(model_of(family, num_labels=3).config)).double().eval()
    batch = {**batch_of("bert-classifier", padding="right")}
    x, y = foreign(model).taken_apart(batch)
    output = composed(model, x)
    close(output, model(**batch).logits)
    total, count = foreign(model).loss(output, y)
    close(total / count, model(**batch).loss)


def test_mixtures_of_experts():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    model = hf("MixtralForCausalLM")(hf("MixtralConfig")(**SHAPE, **experts)).eval()
    batch = batch_of("llama", padding="right")
    x, _ = foreign(model).taken_apart(batch)
    close(composed(model, x), model(**batch).logits, 1e-5)


def test_what_travels_is_no_more_than_the_batch_has():
    model = model_of("llama")
    first = chain(model)[0].module
    plain, padded = batch_of("llama"), batch_of("llama", padding="right")
    assert isinstance(first(foreign(model).taken_apart(plain)[0]), torch.Tensor)
    state = first(foreign(model).taken_apart(padded)[0])
    assert {name: t.dtype for name, t in state.items()} == {
        "hidden_states": torch.float64,
        "attention_mask": torch.bool,
    }


def test_masks_and_rotations_are_made_once_per_stage_and_micro_batch():
    model = model_of("llama")
    calls = []
    model.model.rotary_emb.register_forward_pre_hook(lambda *_: calls.append(1))
    own = foreign(model)
    entrance, *layers, _ = [block.module for block in chain(model)]
    for number in range(3):
        state = entrance(own.taken_apart(batch_of("llama", seed=number, padding="right"))[0])
        for layer in layers:
            state = layer(state)
        assert len(calls) == number + 1
    # Without a mask there is nothing that could differ between micro-batches.
    calls.clear()
    for number in range(3):
        state = entrance(own.taken_apart(batch_of("llama", seed=number))[0])
        for layer in layers:
            state = layer(state)
    assert len(calls) == 1


def test_a_mask_that_is_written_to_counts_as_another():
    model = model_of("llama").eval()
    x, _ = foreign(model).taken_apart(batch_of("llama", padding="right"))
    entrance, layer = [block.module for block in chain(model)][:2]
    state = entrance(x)
    before = layer(state)["hidden_states"]
    state["attention_mask"].fill_(True)
    after = layer(state)["hidden_states"]
    assert (before - after).abs().max() > 1e-6


def test_micro_batches_under_way_in_any_order_do_not_mix():
    model = model_of("llama").eval()
    own = foreign(model)
    blocks = [block.module for block in chain(model)]
    batches = [batch_of("llama", seed=number, padding=("left", "right")[number % 2]) for number in range(4)]
    states = [own.taken_apart(batch)[0] for batch in batches]
    for block in blocks:
        for number in (2, 0, 3, 1):
            states[number] = block(states[number])
    for batch, output in zip(batches, states, strict=True):
        close(output, model(**batch).logits)


def test_blocks_go_by_the_names_of_the_model():
    assert [block.name for block in chain(model_of("gpt2"))] == [
        "transformer.wte",
        *(f"transformer.h.{number}" for number in range(4)),
        "lm_head",
    ]
    names = [block.name for block in chain(model_of("bert"))]
    assert names[:2] == ["bert.embeddings", "bert.encoder.layer.0"]
    assert names[-1] == "cls"


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_keep_their_names(family):
    model = model_of(family)
    found = [name for block in chain(model) for name in state_names(block.module, model).values()]
    known = {id(t): name for name, t in reversed(list(model.state_dict(keep_vars=True).items()))}
    assert set(found) == set(known.values())


def test_optimizers_are_told_original_names():
    told = []

    def make(params, stage):
        told.extend(stage.names)
        return torch.optim.SGD(params, lr=0.1)

    model = model_of("llama")
    unlatch.parallelize(model, stages=2, optimizer=make)
    assert sorted(told) == sorted(name for name, _ in model.named_parameters())


# ---------------------------------------------------------------- training


def plain_loop(model, batches):
    optimizer = sgd(list(model.parameters()))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def without_dropout(model):
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "attn_pdrop", "dropout_prob"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model


@pytest.mark.parametrize(("method", "stages"), [("bp", 1), ("bp", 3), ("gpipe", 2), ("dtr", 1)])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "bert", "bert-classifier", "vit"])
def test_training_is_the_users_own_loop(family, method, stages):
    padding = None if family == "vit" else "right"
    batches = [batch_of(family, size=5, seed=number, padding=padding) for number in range(3)]
    expected = without_dropout(model_of(family, **(UNTIED if family != "vit" else {})))
    losses = plain_loop(expected, batches)
    model = without_dropout(model_of(family, **(UNTIED if family != "vit" else {})))
    run = unlatch.parallelize(model, method, stages=stages, optimizer=sgd)
    steps = [run.step(batch) for batch in batches] + run.flush()
    assert [step.loss for step in steps if step.loss is not None] == pytest.approx(losses, rel=1e-6)
    assert run.module() is model
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)


def test_dropout_is_the_same_when_a_stage_computes_again():
    model = model_of("llama", attention_dropout=0.5, **UNTIED)
    runs = [unlatch.parallelize(copy.deepcopy(model), method, stages=1, optimizer=sgd) for method in ("bp", "dtr")]
    for number in range(3):
        batch = batch_of("llama", seed=number, padding="right")
        one, other = (run.step(batch).loss for run in runs)
        assert one == other
    for one, other in zip(*(run.module().parameters() for run in runs), strict=True):
        close(one, other)


def test_regression_and_several_labels_per_sample():
    for options, labels in (
        ({"num_labels": 1}, torch.randn(4, dtype=torch.float64)),
        ({"num_labels": 3, "problem_type": "regression"}, torch.randn(4, 3, dtype=torch.float64)),
        ({"num_labels": 3}, torch.randint(2, (4, 3)).double()),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.randint(2, (4, 3)).double()),
    ):
        model = model_of("bert-classifier", **options).eval()
        batch = {**batch_of("bert-classifier"), "labels": labels}
        own = foreign(model)
        x, y = own.taken_apart(batch)
        total, count = own.loss(own.output(x), y)
        close(total / count, model(**batch).loss)


def test_a_loss_of_the_users_own():
    def loss(output, labels):
        return torch.nn.functional.cross_entropy(output[:, -1], labels)

    run = unlatch.parallelize(model_of("llama"), stages=2, loss_fn=loss, optimizer=sgd)
    ids = torch.randint(TOKENS, (4, 8))
    assert run.step(ids, ids[:, 0]).loss is not None
    assert run.step({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids[:, 0]).loss is not None


def test_a_model_without_a_head_takes_a_loss():
    torch.manual_seed(0)
    model = hf("GPT2Model")(gpt2().config).double()
    run = unlatch.parallelize(
        model, stages=2, loss_fn=lambda out, y: ((out.mean((1, 2)) - y) ** 2).mean(), optimizer=sgd
    )
    assert run.step(torch.randint(TOKENS, (4, 8)), torch.randn(4, dtype=torch.float64)).loss is not None
    with pytest.raises(ConfigError, match="GPT2Model has no loss that is known here: pass loss_fn"):
        unlatch.parallelize(model, stages=1, optimizer=sgd)


def test_batches_as_the_library_makes_them():
    encoded = hf("BatchEncoding")({**batch_of("llama", padding="right")})
    examples = [{"input_ids": list(range(3, 9)), "attention_mask": [1] * 6, "labels": list(range(3, 9))}] * 4
    collated = hf("default_data_collator")(examples)
    run = unlatch.parallelize(model_of("llama"), stages=2, optimizer=sgd, sample=encoded)
    for batch in (encoded, collated, UserDict(collated)):
        assert run.step(batch).loss is not None


def test_loaders_of_dicts():
    rows = [{name: t[0] for name, t in batch_of("llama", size=1, seed=n).items()} for n in range(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    run = unlatch.parallelize(model_of("llama"), stages=2, optimizer=sgd)
    (epoch,) = unlatch.Trainer(run).fit(loader, 1, loader)
    assert epoch.samples == 8
    model = run.module().eval()
    expected = torch.stack([model(**batch).loss for batch in loader]).mean()
    assert epoch.evaluation["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert epoch.evaluation["perplexity"] == pytest.approx(expected.exp().item(), rel=1e-6)


@pytest.mark.parametrize("method", ["dgl", "auglocal"])
def test_networks_beside_the_stages_leave_the_models_weights_as_they_are(method):
    model = model_of("gpt2")
    before = copy.deepcopy(model.state_dict())
    batch = batch_of("gpt2", padding="right")
    unlatch.parallelize(model, method, stages=2, optimizer=sgd, sample=batch, split=["transformer.h.2"])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


# ------------------------------------------------------------------ errors


def refused(model, **options):
    with pytest.raises(PlanError) as caught:
        unlatch.parallelize(model, stages=1, optimizer=sgd, **options)
    return str(caught.value)


def test_an_unknown_family_is_told_what_can_be_done():
    model = hf("AlbertForMaskedLM")(hf("AlbertConfig")(vocab_size=8, hidden_size=8, num_attention_heads=2))
    text = refused(model)
    assert "AlbertForMaskedLM is of the family 'albert'" in text
    assert "gpt2" in text
    assert "blocks()" in text


class Last(torch.nn.Module):
    """Of a module that answers with names, the hidden states."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x).last_hidden_state


def test_an_unknown_family_works_with_blocks_of_its_own():
    albert = hf("AlbertForMaskedLM")

    class Own(albert):
        def blocks(self):
            return [self.albert.embeddings, Last(self.albert.encoder), self.predictions]

    torch.manual_seed(0)
    config = hf("AlbertConfig")(**{**SHAPE, "embedding_size": 16, "num_hidden_layers": 2})
    model = Own(config).double()
    batch = batch_of("bert")
    expected = model.eval()(**batch).loss.item()
    run = unlatch.parallelize(model, stages=2, optimizer=sgd)
    assert run.step(batch).loss == pytest.approx(expected, rel=1e-6)


def test_encoder_decoders_and_recurrent_models_are_refused_by_name():
    config = hf("T5Config")(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    text = refused(hf("T5ForConditionalGeneration")(config), loss_fn=torch.nn.functional.mse_loss)
    assert "T5ForConditionalGeneration is an encoder-decoder" in text
    config = hf("MambaConfig")(vocab_size=8, hidden_size=8, num_hidden_layers=1)
    assert "MambaForCausalLM is recurrent" in refused(hf("MambaForCausalLM")(config))


def test_what_would_be_lost_or_wrong_is_refused():
    model = model_of("llama")
    model.activation_checkpointing_enable()
    assert "activation_checkpointing_disable()" in refused(model)
    config = hf("MixtralConfig")(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    assert "losses of its routers" in refused(hf("MixtralForCausalLM")(config))


def test_heads_with_several_answers_are_refused():
    model = hf("BertForQuestionAnswering")(model_of("bert").config)
    sample = torch.randint(TOKENS, (4, 8)), torch.zeros(4)
    text = refused(model, loss_fn=torch.nn.functional.mse_loss, sample=sample)
    assert "the model answers with start_logits, end_logits" in text


def test_a_cache_is_never_kept():
    model = model_of("llama", use_cache=True).eval()
    x, _ = foreign(model).taken_apart(batch_of("llama", padding="right"))
    close(composed(model, x), composed(model, x), 0.0)


def test_bad_batches_are_named():
    run = unlatch.parallelize(model_of("llama"), stages=2, optimizer=sgd)
    good = batch_of("llama")

    def fails(batch):
        with pytest.raises(DataError) as caught:
            run.step(batch)
        return str(caught.value)

    without = {name: t for name, t in good.items() if name != "labels"}
    assert "a batch needs 'labels'" in fails(without)
    assert "does not take 'text' from a batch; it takes input_ids" in fails({**good, "text": good["labels"]})
    assert "where it does not count, got labels (4, 7)" in fails({**good, "labels": good["labels"][:, 1:]})
    assert "needs 'input_ids' in every batch" in fails({"labels": good["labels"]})
    assert "'input_ids' as list" in fails({**good, "input_ids": good["input_ids"].tolist()})
    assert run.step(good).loss is not None


def test_labels_that_no_class_has_are_named():
    run = unlatch.parallelize(model_of("llama"), stages=2, optimizer=sgd)
    with pytest.raises(PlanError, match=r"the loss of LlamaForCausalLM fails on labels .*out of bounds"):
        run.step({**batch_of("llama"), "labels": torch.full((4, 8), 99)})
    run = unlatch.parallelize(model_of("bert-classifier"), stages=2, optimizer=sgd)
    with pytest.raises(DataError, match=r"needs 1 label\(s\) for every sample, got labels \(4, 2\)"):
        run.step({**batch_of("bert-classifier"), "labels": torch.zeros(4, 2, dtype=torch.long)})


def test_another_loss_than_its_kind_has_is_not_guessed():
    model = model_of("llama")
    model.loss_function = lambda logits, labels, **_: logits.pow(2).mean()
    run = unlatch.parallelize(model, stages=2, optimizer=sgd)
    with pytest.raises(PlanError, match="computes another loss than is known for its kind"):
        run.step(batch_of("llama"))


def test_a_model_that_does_more_than_its_layers_is_refused_on_the_first_batch():
    model = model_of("llama")
    forward = model.forward

    def scaled(*args, **named):
        out = forward(*args, **named)
        out.logits = out.logits * 2
        return out

    model.forward = scaled
    run = unlatch.parallelize(model, stages=2, optimizer=sgd)
    with pytest.raises(PlanError, match=r"LlamaForCausalLM.forward and the composition of its blocks\(\) differ"):
        run.step(batch_of("llama"))


def test_plain_models_need_a_loss():
    with pytest.raises(ConfigError, match="loss_fn is missing"):
        unlatch.parallelize(torch.nn.Linear(2, 2), stages=1, optimizer=sgd)


# ----------------------------------------------------------------- weights


def test_pretrained_weights_there_and_back(tmp_path):
    source = model_of("llama", **UNTIED)
    source.save_pretrained(tmp_path / "before")
    model = hf("LlamaForCausalLM").from_pretrained(tmp_path / "before", dtype=torch.float64)
    run = unlatch.parallelize(model, "dtr", stages=2, optimizer=sgd)
    for number in range(3):
        run.step(batch_of("llama", seed=number))
    run.flush()
    run.module().save_pretrained(tmp_path / "after")
    again = hf("LlamaForCausalLM").from_pretrained(tmp_path / "after", dtype=torch.float64)
    assert list(again.state_dict()) == list(source.state_dict())
    x = batch_of("llama")
    close(again.eval()(**x).logits, run.module().eval()(**x).logits, 0.0)
    assert (again(**x).logits - source.eval()(**x).logits).abs().max() > 1e-4


def test_ready_metrics_look_at_the_positions_that_a_causal_model_answers_for() -> None:
    """Asked for without a shift, accuracy compared each answer with the token that it was made from."""
    run = unlatch.parallelize(model_of("gpt2"), stages=1, optimizer=sgd)
    batch = batch_of("gpt2")
    known = run.evaluate([batch])
    asked = run.evaluate([batch], metrics=[accuracy, perplexity])
    assert (asked["accuracy"], asked["perplexity"]) == (known["accuracy"], known["perplexity"])


def test_an_encoder_decoder_is_refused_without_a_loss_too() -> None:
    config = hf("T5Config")(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    model = hf("T5ForConditionalGeneration")(config)
    with pytest.raises(PlanError, match="encoder"):
        unlatch.parallelize(model, stages=2, optimizer=sgd)
