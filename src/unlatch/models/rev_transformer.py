"""Reversible transformers: attention and perceptron of a block are the two couplings of a `RevBlock`.

Both streams start as the same tokens; the head reads them side by side.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, ShapeMismatch
from ..nn.branch import as_stream
from ..nn.coupling import RevBlock, Streams
from ..nn.permutation import Merge
from .base import Chain

__all__ = ["RevGPT", "RevViT"]


class _Attention(nn.Module):
    """Self-attention with several heads, each position seeing all (or, if causal, only earlier ones)."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width {width} cannot be shared by {heads} heads: expected a multiple of {heads}")
        self.heads, self.p, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        out: Tensor = self.out(h.transpose(1, 2).reshape(batch, length, width))
        return out


def _block(width: int, heads: int, dropout: float, *, causal: bool) -> RevBlock:
    attention = OrderedDict(
        norm=nn.LayerNorm(width), attention=_Attention(width, heads, dropout, causal), dropout=nn.Dropout(dropout)
    )
    perceptron = OrderedDict(
        norm=nn.LayerNorm(width),
        up=nn.Linear(width, 4 * width),
        gelu=nn.GELU(),
        out=nn.Linear(4 * width, width),
        dropout=nn.Dropout(dropout),
    )
    return RevBlock(nn.Sequential(attention), nn.Sequential(perceptron))


def _initialise(model: nn.Module, depth: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Two branches per block add to the streams: scaled so that their variance does not grow with depth.
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if name.endswith("out.weight") else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class _Patches(nn.Module):
    """Images to two equal streams of tokens, one per patch, with a vector per position."""

    def __init__(self, image: int, patch: int, in_channels: int, width: int) -> None:
        super().__init__()
        if image % patch:
            raise ConfigError(f"images of {image}x{image} cannot be cut into patches of {patch}x{patch}")
        self.project = nn.Conv2d(in_channels, width, patch, patch)
        self.position = nn.Parameter(torch.zeros((image // patch) ** 2, width))

    def forward(self, x: Tensor) -> Streams:
        tokens = self.project(x).flatten(2).transpose(1, 2)
        if tokens.shape[1] != len(self.position):
            raise ShapeMismatch(
                f"images of shape {tuple(x.shape)} give {tokens.shape[1]} patches, the model has positions for "
                f"{len(self.position)}: build it with image={x.shape[-1]}"
            )
        stream = as_stream(tokens + self.position)
        return stream, stream


class _Tokens(nn.Module):
    """Token numbers to two equal streams, with a vector per position."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Streams:
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise ShapeMismatch(
                f"sequences of {length} tokens came, the model takes at most {context}: "
                f"cut the data shorter or build the model with context={length}"
            )
        stream: Tensor = as_stream(self.dropout(self.token(tokens) + self.position.weight[:length]))
        return stream, stream


class _Pool(nn.Module):
    """The mean over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class RevViT(Chain):
    """Reversible vision transformer. Blocks: `embed`, `layers.0` ... `layers.{depth-1}`, `head`.

    **Arguments:**

    - `image`, `patch`: side of the images and of the patches they are cut into.
    - `in_channels`, `classes`: of the data.
    - `depth`, `width`, `heads`: of the blocks.
    - `dropout`: in the attention and on both branches of each block.

    >>> model = RevViT(image=8, patch=2, in_channels=1, depth=2, width=16, heads=2)
    >>> model(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        *,
        image: int = 32,
        patch: int = 4,
        in_channels: int = 3,
        classes: int = 10,
        depth: int = 6,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = _Patches(image, patch, in_channels, width)
        self.layers = nn.Sequential(*(_block(width, heads, dropout, causal=False) for _ in range(depth)))
        self.head = nn.Sequential(
            OrderedDict(
                merge=Merge(-1), norm=nn.LayerNorm(2 * width), pool=_Pool(), linear=nn.Linear(2 * width, classes)
            )
        )
        _initialise(self, depth)

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]


class RevGPT(Chain):
    """Reversible decoder-only transformer: tokens `(N, T)` to logits `(N, T, vocabulary)`.

    Blocks: `embed`, `layers.0` ... `layers.{depth-1}`, `head`.

    **Arguments:**

    - `vocabulary`, `context`: number of different tokens, longest sequence.
    - `depth`, `width`, `heads`: of the blocks.
    - `dropout`: after the embedding, in the attention and on both branches of each block.

    >>> model = RevGPT(vocabulary=11, context=8, depth=2, width=16, heads=2)
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
    ) -> None:
        super().__init__()
        self.embed = _Tokens(vocabulary, context, width, dropout)
        self.layers = nn.Sequential(*(_block(width, heads, dropout, causal=True) for _ in range(depth)))
        self.head = nn.Sequential(
            OrderedDict(
                merge=Merge(-1), norm=nn.LayerNorm(2 * width), linear=nn.Linear(2 * width, vocabulary, bias=False)
            )
        )
        _initialise(self, depth)

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]
