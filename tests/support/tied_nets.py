"""Small networks in which a block reaches across others: a language model with tied embeddings, one with a skip."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unlatch.nn import Recall, Remember

WORDS, WIDTH, LENGTH = 7, 6, 5


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x))
        return out


class TiedLM(nn.Module):
    """Embedding, layers, and a head whose matrix is the embedding, unless it is not `tied`."""

    def __init__(self, layers: int = 2, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(layers))
        self.head = _Head()
        if tied:
            self.head.linear.weight = self.embed.weight

    def blocks(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for block in self.blocks():
            x = block(x)
        return x


class _Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, WORDS, bias=False)
        self.back = nn.Linear(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.back(self.words(x)))


class TiedThrice(TiedLM):
    """The same with one layer, which uses the embedding as well."""

    def __init__(self) -> None:
        super().__init__(0)
        lookup = _Lookup()
        lookup.words.weight = self.embed.weight
        self.layers.append(lookup)


class Padded(nn.Module):
    """Tokens and a mask, which travels up to a last layer that takes the mean over what it marks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = _Embedded(), _Beside(_Layer()), _Pooled()

    def blocks(self) -> list[nn.Module]:
        return [self.embed, self.layer, self.head]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(batch)))
        return out


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"mask": batch["mask"], "hidden": self.words(batch["tokens"])}


class _Beside(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**state, "hidden": self.layer(state["hidden"])}


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, state: dict[str, Tensor]) -> Tensor:
        mask = state["mask"][..., None]
        out: Tensor = self.linear((state["hidden"] * mask).sum(1) / mask.sum(1))
        return out


class _Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x, skip], -1)))


class SmallUNet(nn.Module):
    """Two levels down, one in the middle, two up; each level up sees the output of its level down."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_Layer() for _ in range(2))
        self.middle = _Layer()
        self.up = nn.ModuleList(_Up() for _ in range(2))

    def blocks(self) -> list[nn.Module]:
        first, second = self.down
        return [
            Remember(first, "first"),
            Remember(second, "second"),
            self.middle,
            Recall(self.up[0], "second"),
            Recall(self.up[1], "first"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](first)
        x = self.up[0](self.middle(second), second)
        out: Tensor = self.up[1](x, first)
        return out


def tokens(batches: int, samples: int = 4, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches of sequences with their next tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, LENGTH)
    return [tuple(torch.randint(WORDS, shape, generator=generator) for _ in "xy") for _ in range(batches)]  # type: ignore[misc]


def padded(batches: int, samples: int = 4, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    """The same with ends of different lengths that do not count: their target is -100."""
    generator = torch.Generator().manual_seed(seed)
    found = tokens(batches, samples, seed)
    for _, y in found:
        lengths = torch.randint(1, LENGTH + 1, (samples,), generator=generator)
        y[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return found


def token_mean(logits: Tensor, y: Tensor) -> Tensor:
    """A mean over tokens that are not padding."""
    return cross_entropy(logits.flatten(0, -2), y.flatten())


def token_sum(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Its sum, and how many they are."""
    return cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum"), (y != -100).sum()
