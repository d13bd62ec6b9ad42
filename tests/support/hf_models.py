"""Models of `transformers` small enough to train in milliseconds, with random weights, and batches for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Nothing is ever downloaded; the library must not even try.
os.environ["HF_HUB_OFFLINE"] = "1"

TOKENS = 32
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": TOKENS,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}


def hf(name: str) -> Any:
    """A name of the library."""
    import transformers

    return getattr(transformers, name)


def _llama_like(name: str, **options: Any) -> Callable[..., nn.Module]:
    def make(**more: Any) -> nn.Module:
        found: nn.Module = hf(f"{name}ForCausalLM")(hf(f"{name}Config")(**{**GROUPED, **options, **more}))
        return found

    return make


def _bert_like(name: str, head: str, **options: Any) -> Callable[..., nn.Module]:
    def make(**more: Any) -> nn.Module:
        found: nn.Module = hf(f"{name}{head}")(hf(f"{name}Config")(**{**SHAPE, **options, **more}))
        return found

    return make


def gpt2(head: str = "LMHeadModel", **more: Any) -> nn.Module:
    ends = {name: SHAPE[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": TOKENS, "n_positions": 16, **ends}
    found: nn.Module = hf(f"GPT2{head}")(hf("GPT2Config")(**{**config, **more}))
    return found


def vit(**more: Any) -> nn.Module:
    shape = {name: SHAPE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = {**shape, "intermediate_size": 96, "image_size": 8, "patch_size": 4, "num_labels": 3}
    found: nn.Module = hf("ViTForImageClassification")(hf("ViTConfig")(**{**config, **more}))
    return found


#: Makers of models by family; `**more` goes to the configuration.
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "llama": _llama_like("Llama"),
    "qwen2": _llama_like("Qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "qwen3": _llama_like("Qwen3", head_dim=16),
    "smollm3": _llama_like("SmolLM3"),
    "mistral": _llama_like("Mistral", sliding_window=4),
    "gemma2": _llama_like("Gemma2", head_dim=16, sliding_window=4),
    "phi": _llama_like("Phi"),
    "olmo": _llama_like("Olmo"),
    "granite": _llama_like("Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
    "gpt-neox": _llama_like("GPTNeoX"),
    "bert": _bert_like("Bert", "ForMaskedLM"),
    "bert-classifier": _bert_like("Bert", "ForSequenceClassification", num_labels=3),
    "bert-tokens": _bert_like("Bert", "ForTokenClassification", num_labels=3),
    "roberta": _bert_like("Roberta", "ForMaskedLM", max_position_embeddings=20),
    "distilbert": _bert_like("DistilBert", "ForSequenceClassification", num_labels=3),
    "electra": _bert_like("Electra", "ForMaskedLM", embedding_size=32),
    "vit": vit,
}


def model_of(family: str, seed: int = 0, **more: Any) -> nn.Module:
    """In float64, which shows what single precision hides."""
    torch.manual_seed(seed)
    return FAMILIES[family](**more).double()


def batch_of(family: str, size: int = 4, seed: int = 1, *, padding: str | None = None) -> dict[str, Tensor]:
    """A batch as collators make them; `padding` is `"left"`, `"right"` or absent together with the mask."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(3, (size,), generator=generator)
    if family == "vit":
        images = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": images, "labels": classes}
    ids = torch.randint(3, TOKENS, (size, 8), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if family in ("bert-classifier", "distilbert"):
        batch["labels"] = classes
    elif family == "bert-tokens":
        batch["labels"] = torch.randint(3, ids.shape, generator=generator)
    if padding is not None:
        # Samples of different lengths, so that micro-batches differ in what they count.
        lengths = torch.tensor([(3 * number) % 7 + 2 for number in range(size)])[:, None]
        place = torch.arange(8)
        mask = place < lengths if padding == "right" else place >= 8 - lengths
        batch["attention_mask"] = mask.long()
        batch["input_ids"] = torch.where(mask, ids, 0)
        if batch["labels"].dim() == 2:
            batch["labels"] = torch.where(mask, batch["labels"], -100)
    return batch


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
