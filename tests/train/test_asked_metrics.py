"""Metrics: sums over batches, the same on every rank, and only those that were asked for or that are known to fit."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.errors import ConfigError, DataError, ShapeMismatch, StageFailed
from unlatch.metrics import accuracy, perplexity, top_k

SGD = partial(torch.optim.SGD, lr=0.1)
VOCABULARY, LENGTH = 7, 5


def classifier(**changes) -> unlatch.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return unlatch.parallelize(
        model, "bp", stages=2, split=["2"], optimizer=SGD, **{"loss_fn": cross_entropy, **changes}
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (8, 8, 3)]


def whole(run: unlatch.Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets of all samples at once, by plain torch."""
    with torch.no_grad():
        return run.module().eval()(torch.cat([x for x, _ in batches()])), torch.cat([y for _, y in batches()])


def token_loss(logits, labels):
    """As language models have it: the output of a position against the next label, padding left out."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def counted_token_loss(logits, labels):
    left = labels[:, 1:].flatten()
    total = cross_entropy(logits[:, :-1].flatten(0, 1), left, ignore_index=-100, reduction="sum")
    return total, (left != -100).sum()


def language_model(loss_fn=token_loss, **changes) -> unlatch.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    return unlatch.parallelize(model, "bp", stages=2, split=["1"], loss_fn=loss_fn, optimizer=SGD, **changes)


def texts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches whose labels are their own input, with padding of different length."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for padding in (0, 3, 1):
        tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
        labels = tokens.clone()
        labels[:, LENGTH - padding :] = -100
        found.append((tokens, labels))
    return found


def by_hand() -> dict[str, float]:
    """Over all tokens that count, by plain torch."""
    run = language_model()
    logits = [run.module()(x)[:, :-1].flatten(0, 1) for x, _ in texts()]
    labels = [y[:, 1:].flatten() for _, y in texts()]
    kept = torch.cat(labels) != -100
    scores, classes = torch.cat(logits)[kept].detach(), torch.cat(labels)[kept]
    loss = float(cross_entropy(scores, classes))
    top = (scores.topk(5).indices == classes[:, None]).any(1)
    hits = scores.argmax(1) == classes
    return {"loss": loss, "accuracy": float(hits.float().mean()), "top5": float(top.float().mean())}


def test_language_models_got_a_false_accuracy_unasked():
    """`evaluate` compared every position with its own label and counted padding as wrong."""
    assert set(language_model().evaluate(texts())) == {"loss", "samples"}


def test_language_models_with_shift_and_padding():
    expected = by_hand()
    found = language_model(counted_token_loss).evaluate(
        texts(), metrics=[accuracy(shift=1), top_k(5, shift=1), perplexity(shift=1)]
    )
    assert found["samples"] == 12
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["accuracy"] == pytest.approx(expected["accuracy"])
    assert found["top5"] == pytest.approx(expected["top5"])
    assert found["perplexity"] == pytest.approx(math.exp(expected["loss"]), rel=1e-5)


def test_classifiers_get_their_accuracy_unasked():
    run = classifier()
    output, target = whole(run)
    found = run.evaluate(batches())
    assert list(found) == ["loss", "samples", "accuracy"]
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == target).float().mean()))
    assert set(run.evaluate(batches(), metrics=[])) == {"loss", "samples"}


def test_one_output_is_no_classifier():
    """Scores of one class agree with class 0 always."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    loss = lambda output, target: ((output[:, 0] - target) ** 2).mean()  # noqa: E731
    run = unlatch.parallelize(model, "bp", stages=2, split=["1"], loss_fn=loss, optimizer=SGD)
    assert set(run.evaluate(batches())) == {"loss", "samples"}


def test_sums_counts_and_summaries():
    class Spread:
        """The standard deviation of the outputs: from two sums."""

        def __call__(self, output, target):
            return {"sum": (output.sum(), output.numel()), "square": (output.square().sum(), output.numel())}

        def summary(self, sums):
            mean, square = (total / count for total, count in (sums["sum"], sums["square"]))
            return {"spread": math.sqrt(square - mean**2)}

    def first(output, target):
        return {"first": (target == 0).sum(), "per_score": (output.sum(), output.numel())}

    run = classifier(metrics=[first])
    output, target = whole(run)
    found = run.evaluate(batches())
    assert found["first"] == pytest.approx(float((target == 0).float().mean()))
    assert found["per_score"] == pytest.approx(float(output.mean()), rel=1e-5)
    assert "accuracy" not in found
    asked = run.evaluate(batches(), metrics=[Spread(), accuracy])
    assert asked["spread"] == pytest.approx(float(output.std(correction=0)), rel=1e-5)
    assert set(asked) == {"loss", "samples", "spread", "accuracy"}


@pytest.mark.parametrize(
    ("output", "target", "options", "text"),
    [
        ((4, 3), torch.zeros(4), {}, r"got a float32 tensor of shape \(4, 3\) and a float32 tensor of shape \(4,\)"),
        ((4, 3), torch.zeros(5, dtype=int), {}, r"compares class scores with class numbers, \(N, C\) with \(N,\)"),
        ((4, 3), torch.full((4,), 3), {}, r"targets from 3 to 3 for 3 classes; those to leave out are named by ignore"),
        ((4, 3, 3), torch.zeros(4, 3, dtype=int), {}, r"either axis may hold the classes: say axis=1 or axis=-1"),
        ((4, 3), torch.zeros(4, dtype=int), {"shift": 1}, r"shift=1 needs sequences \(N, T, C\) and \(N, T\)"),
        ((4, 5, 3), torch.zeros(4, 5, dtype=int), {"axis": 1}, r"axis=1"),
    ],
)
def test_shapes_that_do_not_fit_are_named(output, target, options, text):
    with pytest.raises(ShapeMismatch, match=text):
        accuracy(**options)(torch.zeros(output), target)


def test_where_the_classes_are():
    scores = torch.zeros(4, 6, 3)
    scores[..., 2] = 1.0
    target = torch.full((4, 6), 2)
    assert accuracy(scores, target) == {"accuracy": (24.0, 24.0)}
    assert accuracy(scores.movedim(-1, 1), target) == {"accuracy": (24.0, 24.0)}
    square = torch.zeros(2, 3, 3)
    square[:, 2] = 1.0
    assert accuracy(axis=1)(square, torch.full((2, 3), 2)) == {"accuracy": (6.0, 6.0)}
    assert accuracy(axis=-1)(square, torch.full((2, 3), 2)) == {"accuracy": (0.0, 6.0)}
    assert perplexity(ignore=None)(scores, target) != {}


def returns(value):
    def broken(output, target):
        return value

    return broken


def raises(output, target):
    raise KeyError("logits")


@pytest.mark.parametrize(
    ("metric", "kind", "text"),
    [
        (
            accuracy(shift=1),
            ShapeMismatch,
            r"metric accuracy at stage 1 in batch 0 of the evaluation: accuracy compares",
        ),
        (raises, StageFailed, r"metric raises at stage 1 in batch 0 of the evaluation raised KeyError: 'logits'"),
        (returns(0.5), ShapeMismatch, r"metric broken at stage 1 .* it returned 0.5: expected a dict of sums"),
        (returns({"a": (1, 2, 3)}), ShapeMismatch, r"'a' is tuple of 3: expected a number, or a pair"),
        (returns({"a": torch.zeros(2)}), ShapeMismatch, r"'a' is a float32 tensor of shape \(2,\)"),
        (returns({1: 2.0}), ShapeMismatch, "a dict with the key 1"),
        (returns({"loss": 1.0}), ConfigError, "metric broken reports 'loss', which is there already"),
    ],
)
def test_what_is_wrong_with_a_metric_is_named(metric, kind, text):
    with pytest.raises(kind, match=text):
        classifier().evaluate(batches(), metrics=[metric])


def test_a_summary_that_is_none():
    class Odd:
        def __call__(self, output, target):
            return {"a": 1.0}

        def summary(self, sums):
            return sums["a"]

    with pytest.raises(
        ShapeMismatch, match="metric Odd over all batches of the evaluation: its summary returned tuple"
    ):
        classifier().evaluate(batches(), metrics=[Odd()])


@pytest.mark.parametrize("metrics", [accuracy, "accuracy", [accuracy, "top5"], [accuracy, top_k], [accuracy, accuracy]])
def test_what_is_no_list_of_metrics_is_refused(metrics):
    with pytest.raises(ConfigError, match=r"metrics must be a list|metrics\[1\] must be a function|is there already"):
        classifier().evaluate(batches(), metrics=metrics)


def test_unknown_options():
    with pytest.raises(ConfigError, match="accuracy has the options ignore, shift, axis, k; got shfit"):
        accuracy(shfit=1)


def test_counts_below_one_are_divided_by():
    """A loss whose weights add up to less than 1 was reported as its sum."""
    x, y = torch.randn(8, 4), torch.randint(3, (8,))

    def weighted(output, target):
        return 0.01 * cross_entropy(output, target, reduction="sum"), 0.01 * len(target)

    found = []
    for loss_fn in (cross_entropy, weighted):
        run = classifier(loss_fn=loss_fn)
        found.append((run.step(x, y).loss, run.evaluate([(x, y)])["loss"]))
    assert found[1] == pytest.approx(found[0])


def test_nothing_has_no_mean():
    """An evaluation of nothing gave a loss of 0 and so passed for a perfect one."""
    run = classifier()
    assert math.isnan(run.evaluate([])["loss"])
    x, y = torch.randn(4, 4), torch.full((4,), -100)
    found = run.evaluate([(x, y)], metrics=[accuracy, perplexity])
    assert math.isnan(found["accuracy"])
    assert math.isnan(found["perplexity"])


def test_a_class_of_losses_a_dict_and_a_scheduler_that_is_none_are_named():
    with pytest.raises(ConfigError, match=r"loss_fn is the class CrossEntropyLoss, which makes losses: pass"):
        classifier(loss_fn=torch.nn.CrossEntropyLoss)
    with pytest.raises(DataError, match=r"a batch is a pair here, step\(x, y\), got one dict of input, labels"):
        classifier().step({"input": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.long)})
    with pytest.raises(ConfigError, match="None"):
        classifier(lr_scheduler=lambda optimizer: None)
