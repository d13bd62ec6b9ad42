"""A small decoder-only transformer: embedding, pre-norm causal blocks, final norm and an output layer."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, ShapeMismatch
from ..nn.apply import Apply
from ..nn.parts import Divisible
from .base import Chain

__all__ = ["GPT", "CausalBlock", "next_token_loss"]


class _Embedding(nn.Module):
    """Tokens `(N, T)` to vectors `(N, T, width)`: the token's vector plus that of its position."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise ShapeMismatch(
                f"sequences of {length} tokens came, the model takes at most {context}: "
                f"cut the data shorter or build the model with context={length}"
            )
        out: Tensor = self.dropout(self.token(tokens) + self.position.weight[:length])
        return out


class _Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.p = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        out: Tensor = self.out(h.transpose(1, 2).reshape(batch, length, width))
        return out


def _attend(x: Tensor, norm: nn.Module, attention: nn.Module, dropout: nn.Module) -> Tensor:
    out: Tensor = x + dropout(attention(norm(x)))
    return out


def _perceive(x: Tensor, norm: nn.Module, up: nn.Module, down: nn.Module, dropout: nn.Module) -> Tensor:
    out: Tensor = x + dropout(down(F.gelu(up(norm(x)))))
    return out


class CausalBlock(Divisible):
    """Attention and a perceptron of four times the width, each after a layer norm and added to its input.

    >>> import torch
    >>> CausalBlock(16, heads=2)(torch.zeros(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = _attend(x, self.norm1, self.attention, self.dropout)
        return _perceive(x, self.norm2, self.up, self.down, self.dropout)

    def parts(self) -> list[nn.Module]:
        """Attention and perceptron."""
        first = Apply(_attend, self.norm1, self.attention, self.dropout)
        return [first, Apply(_perceive, self.norm2, self.up, self.down, self.dropout)]


class _NormHead(nn.Module):
    """Final layer norm and the output layer."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))
        return logits


class GPT(Chain):
    """Tokens `(N, T)` to logits `(N, T, vocabulary)`; position t sees tokens 0..t only.

    Blocks: `embed`, `layers.0` ... `layers.{depth-1}`, `head`.

    **Arguments:**

    - `vocabulary`: number of different tokens.
    - `context`: longest sequence.
    - `depth`, `width`, `heads`: of the causal blocks.
    - `dropout`: after the embedding, in the attention and on both branches of each block.
    - `tied`: whether the output layer uses the vectors of the embedding.

    >>> import torch
    >>> model = GPT(vocabulary=11, context=8, depth=2, width=16, heads=2)
    >>> model(torch.zeros(3, 8, dtype=torch.long)).shape
    torch.Size([3, 8, 11])
    """

    def __init__(
        self,
        *,
        vocabulary: int = 65,
        context: int = 128,
        depth: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width {width} cannot be shared by {heads} heads: expected a multiple of {heads}")
        self.embed = _Embedding(vocabulary, context, width, dropout)
        self.layers = nn.Sequential(*(CausalBlock(width, heads, dropout) for _ in range(depth)))
        self.head = _NormHead(width, vocabulary)
        if tied:
            self.head.linear.weight = self.embed.token.weight
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Two branches per block add to the stream: scaled so that its variance does not grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all positions, for logits `(N, T, V)` and targets `(N, T)`.

    >>> import torch
    >>> next_token_loss(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)).exp().round()
    tensor(4.)
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
