"""A model of Hugging Face as it is, trained in two stages and saved where it came from.

    pip install 'unlatch[hf]'
    python examples/with_transformers.py

Shows that `parallelize` needs neither `blocks()` nor a loss from you: a tiny GPT-2 learns to repeat what it has read.
Put `GPT2LMHeadModel.from_pretrained("gpt2")` in its place to train the real one; nothing else changes.
"""

from __future__ import annotations

import tempfile
from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import unlatch


def batches(count: int, seed: int, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Random tokens, and the same again; only the second half counts."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = torch.randint(3, 32, (32, length), generator=generator).repeat(1, 2)
        labels = tokens.clone()
        labels[:, :length] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 32, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))
    adamw = partial(torch.optim.AdamW, lr=3e-3)
    run = unlatch.parallelize(model, "pipedream", stages=2, optimizer=adamw, split=["transformer.h.1"])
    before = run.evaluate(batches(2, seed=1))["loss"]
    unlatch.Trainer(run).fit(batches(40, seed=0), epochs=3)
    after = run.evaluate(batches(2, seed=1))
    print(f"loss {before:.2f} before, {after['loss']:.2f} after; accuracy {after['accuracy']:.3f}")
    with tempfile.TemporaryDirectory() as folder:
        run.module().save_pretrained(folder)
        again = GPT2LMHeadModel.from_pretrained(folder)
    print("saved and loaded by transformers:", torch.equal(again.lm_head.weight, run.module().lm_head.weight))


if __name__ == "__main__":
    main()
