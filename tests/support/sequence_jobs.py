"""Recurrent and encoder-decoder models, and data that workers collate, to be run inline and on ranks alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import unlatch
from rank_jobs import Outcome, copied_state, plain_sgd

WORDS, WIDTH = 11, 8
#: Stands for no word: what is fed of it is ignored by the loss.
PAD = -100


class First(nn.Module):
    """Of what a recurrent layer returns, the outputs; its last state goes no further."""

    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        return x[0]


def recurrent() -> nn.Sequential:
    """The state of the first layer crosses a cut before it."""
    torch.manual_seed(0)
    layers = [nn.LSTM(WIDTH, WIDTH, batch_first=True), First(), nn.GRU(WIDTH, WIDTH, batch_first=True), First()]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.source(x[0]), self.target(x[1])


class Encode(nn.Module):
    """Works on the memory; the targets pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(x[0]), x[1]


class Decode(nn.Module):
    """Works on the targets; the memory passes by, for the decoders that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(x[1].shape[1])
        return x[0], self.layer(x[1], x[0], tgt_mask=mask, tgt_is_causal=True)


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(x[1])


def encoder_decoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Embed(), Encode(), Encode(), Decode(), Decode(), Read())


def by_word(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PAD)


def sentences(count: int, length: int = 5) -> Tensor:
    return torch.randint(WORDS, (count, length), generator=torch.Generator().manual_seed(1))


def train_sequences(kind: str, method: str, cut: str) -> Outcome:
    """Train and tell what must not depend on where it ran."""
    words = sentences(24)
    model, x = (recurrent(), words) if kind == "recurrent" else (encoder_decoder(), (words, words.roll(1, 1)))
    batches = [(_rows(x, n), words[n : n + 8]) for n in range(0, 24, 8)]
    run = unlatch.parallelize(
        model, method, stages=2, loss_fn=by_word, optimizer=plain_sgd, split=[cut], sample=batches[0]
    )
    with run:
        losses = [run.step(x, y).loss for x, y in batches] + [result.loss for result in run.flush()]
        return {"losses": losses, "state": copied_state(run.module())}


def _rows(x: Any, start: int) -> Any:
    return tuple(part[start : start + 8] for part in x) if isinstance(x, tuple) else x[start : start + 8]


# --------------------------------------------------------------------------------------- loaders with workers


class Lines:
    """A data set of sentences of different lengths."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return sentences(20)[index, : 2 + index % 4]


def padded(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch of sentences as long as its longest one."""
    return pad_sequence(lines, batch_first=True), pad_sequence(lines, batch_first=True, padding_value=PAD)


def train_with_workers(workers: int) -> Outcome:
    loader = DataLoader(Lines(), batch_size=6, num_workers=workers, collate_fn=lambda lines: padded(lines))
    run = unlatch.parallelize(recurrent(), "dtr", stages=2, loss_fn=by_word, optimizer=plain_sgd, split=["3"])
    with run:
        history = unlatch.Trainer(run).fit(loader if 0 in run.stations else None, epochs=2)
        found = run.evaluate(loader if 0 in run.stations else None)
        return {"losses": [epoch.loss for epoch in history], "loss": found["loss"], "state": copied_state(run.module())}
