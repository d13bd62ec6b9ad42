"""The small transformer: causal, sized as said, its loss and its attention against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from unlatch.errors import ConfigError, ShapeMismatch
from unlatch.models import GPT, next_token_loss
from unlatch.models.gpt import CausalBlock


def small(**options: float) -> GPT:
    return GPT(**{"vocabulary": 11, "context": 8, "depth": 2, "width": 16, "heads": 4, **options})


def test_a_position_depends_on_itself_and_earlier_ones_only() -> None:
    model = small().double()
    tokens = torch.randint(0, 11, (1, 8))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 11
    before, after = model(tokens), model(other)
    torch.testing.assert_close(before[0, :5], after[0, :5], rtol=0, atol=1e-12)
    assert ((before[0, 5:] - after[0, 5:]).abs().amax(1) > 1e-6).all()


def test_shorter_sequences_are_prefixes_of_longer_ones() -> None:
    model = small().double()
    tokens = torch.randint(0, 11, (2, 8))
    torch.testing.assert_close(model(tokens[:, :3]), model(tokens)[:, :3], rtol=0, atol=1e-12)


def test_attention_follows_its_formula() -> None:
    attention = CausalBlock(8, heads=2).double().attention
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = attention.qkv(x)[0].split(8, dim=1)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        scores = q[:, part] @ k[:, part].T / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(1) @ v[:, part])
    torch.testing.assert_close(attention(x)[0], attention.out(torch.cat(heads, 1)), rtol=0, atol=1e-12)


def test_first_loss_is_that_of_guessing() -> None:
    tokens = torch.randint(0, 11, (4, 8))
    loss = next_token_loss(small()(tokens), tokens)
    assert loss.item() == pytest.approx(math.log(11), abs=0.15)


def test_loss_equals_cross_entropy_over_positions() -> None:
    logits, targets = torch.randn(2, 3, 5, dtype=torch.float64), torch.randint(0, 5, (2, 3))
    expected = F.cross_entropy(logits.transpose(1, 2), targets)
    torch.testing.assert_close(next_token_loss(logits, targets), expected)


def test_output_weights_are_not_those_of_the_embedding() -> None:
    model = small()
    assert model.head.linear.weight is not model.embed.token.weight
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))


def test_dropout_acts_in_training_only() -> None:
    model, tokens = small(dropout=0.5), torch.randint(0, 11, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_it_learns_a_repeating_sequence() -> None:
    model = small(depth=1)
    tokens = torch.arange(9).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_too_long_a_sequence_is_refused_with_the_cure() -> None:
    with pytest.raises(ShapeMismatch, match=r"9 tokens came, .* at most 8: .*context=9"):
        small()(torch.zeros(1, 9, dtype=torch.long))


def test_width_must_suit_the_heads() -> None:
    with pytest.raises(ConfigError, match="width 10 cannot be shared by 4 heads"):
        small(width=10)
