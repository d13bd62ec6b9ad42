"""Models of Hugging Face's `transformers` as they are: their layers, their batches, their losses.

The library is not imported: all that is used belongs to the model. How blocks are made of it is in
`huggingface_blocks`, the losses are in `huggingface_losses`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import DataError, PlanError
from ..metrics import Metric, accuracy, perplexity
from .huggingface_blocks import TRAVELS, Asked, Entrance, Exit, Layer, Layout, Parts, Role, answer_of, has_parameters
from .huggingface_losses import by_token, causal, classes, loss_of, numbers_per_sample
from .tree import Tree, batch_size

__all__ = ["HuggingFace"]

# Arguments of a forward that are no part of a batch.
_NOT_DATA = (
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "logits_to_keep",
)
# Families without a pipeline plan of their own, by `config.model_type`.
_LAYOUTS = {
    "bert": Layout("encoder.layer", ("embeddings",)),
    "camembert": Layout("encoder.layer", ("embeddings",)),
    "deit": Layout("layers", ("embeddings",)),
    "distilbert": Layout("transformer.layer", ("embeddings",)),
    "electra": Layout("encoder.layer", ("embeddings", "embeddings_project")),
    "gpt2": Layout("h", ("wte", "wpe", "drop")),
    "gpt_bigcode": Layout("h", ("wte", "wpe", "drop")),
    "roberta": Layout("encoder.layer", ("embeddings",)),
    "vit": Layout("layers", ("embeddings",)),
    "xlm-roberta": Layout("encoder.layer", ("embeddings",)),
}
# Most decoders look like this; whether one computes what it seems to, the first batch shows.
_USUAL = Layout("layers", ("embed_tokens",))


class HuggingFace:
    """A model of `transformers`, as it is; see `Foreign` for what it tells."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.body: Any = model.base_model
        self._forward = inspect.signature(type(model).forward).parameters
        self._main = str(self.model.main_input_name)
        self._loss = loss_of(model)

    # ----------------------------------------------------------------- blocks

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Entrance, layers, exit, by the names of the parts that they run."""
        layout = self._layout()
        body = next(name for name, module in self.model.named_modules() if module is self.body)
        layers: Any = self.body.get_submodule(layout.layers)
        parts = Parts(self.body, layout)
        asked = Asked(parts, self._options())
        named: list[tuple[str, nn.Module]] = [
            (_joined(body, layout.before[0]), Entrance(parts, self._options(), self._keeps()))
        ]
        for index, layer in enumerate(layers):
            name = _joined(body, layout.layers, str(index))
            named.append((name, Layer(layer, asked, index)))
        exit_ = Exit(self.model, parts, self._main, self._options())
        own = [name for name, part in self.model.named_children() if part is not self.body and has_parameters(part)]
        after = parts.named(Role.AFTER)
        return [*named, (own[-1] if own else after[-1] if after else "exit", exit_)]

    def _layout(self) -> Layout:
        """From the model's own pipeline plan, or from the table."""
        self._refuse_what_would_be_wrong()
        plan = getattr(self.body.config, "base_model_pp_plan", None) or getattr(self.body, "_pp_plan", None) or {}
        names = list(plan)
        for position, name in enumerate(names):
            if position and isinstance(getattr(self.body, name, None), nn.ModuleList):
                return Layout(name, tuple(names[:position]), tuple(names[position + 1 :]))
        layout = _LAYOUTS.get(self.model.config.model_type, _USUAL)
        if not _reaches(self.body, layout):
            raise PlanError(
                f"{type(self.model).__name__} is of the family '{self.model.config.model_type}', whose layers are not "
                "known here and which has no pipeline plan (base_model_pp_plan) that says where they are. Known are "
                f"decoders with such a plan or of that form (Llama, Qwen, Gemma, ...) and {', '.join(_LAYOUTS)}. "
                "Others work with a method blocks() in a subclass: it lists modules whose composition is the model"
            )
        return layout

    def _refuse_what_would_be_wrong(self) -> None:
        model, config, name = self.model, self.model.config, type(self.model).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise PlanError(
                f"{name} is an encoder-decoder: every layer of its decoder reads the encoder's output, so it is no "
                "chain of layers. Train an encoder (BERT) or a decoder (GPT-2, Llama) instead, or write a method "
                "blocks() in a subclass that passes the encoder's output along in a dict"
            )
        if any(getattr(part, "_is_stateful", False) for part in (model, self.body)):
            raise PlanError(
                f"{name} is recurrent (a state-space model or a hybrid with one): its layers keep a state of their own "
                "that a chain of blocks does not see. Take an attention-only family, or write a method blocks() in a "
                "subclass whose modules keep nothing between calls"
            )
        if getattr(config, "output_router_logits", False):
            raise PlanError(
                f"{name} adds the losses of its routers to the loss (config.output_router_logits), which are made in "
                "every layer and would be lost: set config.output_router_logits = False to train without them"
            )
        if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
            raise PlanError(
                f"{name} has gradient checkpointing on, which would compute its layers again at whatever weights there "
                "are by then: switch it off (activation_checkpointing_disable(), gradient_checkpointing_disable() in "
                "older versions) and choose a method that recomputes"
            )
        if getattr(config, "add_cross_attention", False):
            raise PlanError(f"{name} has cross-attention, so it is no chain of layers: set add_cross_attention=False")

    def _options(self) -> dict[str, Any]:
        """What is said in every call: training needs no cache, and variants answer with names."""
        cached = "use_cache" in inspect.signature(type(self.body).forward).parameters
        return {"return_dict": True} | ({"use_cache": False} if cached else {})

    def _keeps(self) -> tuple[str, ...]:
        """What of a batch goes on after the entrance."""
        # Where no token stands for the whole, the last one that is no padding is classified.
        pools = self._loss is classes and hasattr(self.model, "score")
        return (*TRAVELS, "input_ids") if pools else TRAVELS

    # ---------------------------------------------------------------- batches

    def taken_apart(self, batch: Mapping[str, Any] | tuple[Any, Any], *, own_loss: bool = True) -> tuple[Tree, Tree]:
        """`(x, y)` from a dict as `forward` takes it, or from a pair of inputs and labels."""
        if isinstance(batch, tuple):
            inputs, labels = batch
        else:
            inputs, labels = dict(batch), None
            if isinstance(inputs.get("labels"), Tensor):
                labels = inputs.pop("labels")
            else:
                raise DataError(
                    f"a batch needs 'labels' as a tensor, got {_shown(batch)}: let the collator add them "
                    "(DataCollatorForLanguageModeling does), or feed pairs (inputs, labels)"
                )
        if isinstance(inputs, Tensor):
            return inputs, labels
        if not isinstance(inputs, Mapping):
            raise DataError(f"{type(self.model).__name__} takes a tensor or a dict, got {type(inputs).__name__}")
        given = {name: value for name, value in inputs.items() if value is not None}
        self._check_inputs(given)
        rows = batch_size(given[self._main])
        # Positions that are the same for all samples are cut into micro-batches with them.
        x = {name: t.expand(rows, *t.shape[1:]) if _is_shared(t, rows) else t for name, t in given.items()}
        if own_loss:
            self._check_labels(x[self._main], labels)
        return (x[self._main] if len(x) == 1 else x), labels

    def _check_inputs(self, given: Mapping[str, Any]) -> None:
        name = type(self.model).__name__
        known = [key for key in self._forward if key not in (*_NOT_DATA, "labels", "self", "kwargs")]
        unknown = [key for key in given if key not in known]
        if unknown:
            raise DataError(
                f"{name} does not take {', '.join(map(repr, unknown))} from a batch; it takes {', '.join(known)} and "
                "labels. Leave the rest out in the collator, as transformers does with remove_unused_columns"
            )
        if self._main not in given:
            raise DataError(f"{name} needs {self._main!r} in every batch, got {_shown(given)}")
        odd = [key for key, value in given.items() if not isinstance(value, Tensor)]
        if odd:
            raise DataError(
                f"a batch is made of tensors, got {odd[0]!r} as {type(given[odd[0]]).__name__}: let the tokenizer or "
                "the data set return them (return_tensors='pt', with_format('torch'))"
            )

    def _check_labels(self, main: Tensor, labels: Any) -> None:
        if self._loss is None or not isinstance(labels, Tensor):
            return
        shape = tuple(labels.shape)
        if self._loss is classes:
            each = numbers_per_sample(labels, self.model.config)
            wrong, wanted = labels.numel() != each * len(main), f"{each} label(s) for every sample"
        else:
            wrong, wanted = shape != tuple(main.shape[:2]), "one label for every token, -100 where it does not count"
        if wrong:
            raise DataError(
                f"{type(self.model).__name__} needs {wanted}, got labels {shape} for {self._main} {tuple(main.shape)}"
            )

    # ------------------------------------------------------- what it computes

    @property
    def loss(self) -> Callable[[Any, Any], tuple[Tensor, Tensor]] | None:
        """The loss that the model computes from `labels`, as a sum and what it is a mean over."""
        kind, config = self._loss, self.model.config
        if kind is None:
            return None

        def own(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return kind(output, labels, config)

        return own

    @property
    def metrics(self) -> tuple[Metric, ...] | None:
        """How well tokens are guessed, where they are."""
        if self._loss is causal:
            return accuracy(shift=1), perplexity(shift=1)
        return (accuracy(axis=-1), perplexity(axis=-1)) if self._loss is by_token else None

    def output(self, x: Tree) -> Tensor:
        """The model's own answer."""
        return answer_of(self.model(**self._arguments(x), **self._options()))

    def own_loss(self, x: Tree, y: Tree) -> Tensor | None:
        """The model's own loss."""
        if self._loss is None:
            return None
        found = self.model(**self._arguments(x), labels=y, **self._options()).loss
        return found if isinstance(found, Tensor) else None

    def _arguments(self, x: Tree) -> dict[str, Any]:
        return dict(x) if isinstance(x, Mapping) else {self._main: x}


def _is_shared(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == 1 and rows != 1


def _reaches(body: nn.Module, layout: Layout) -> bool:
    try:
        return isinstance(body.get_submodule(layout.layers), nn.ModuleList) and hasattr(body, layout.before[0])
    except AttributeError:
        return False


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _shown(batch: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name!r}: {_kind_of(value)}" for name, value in batch.items()) + "}"


def _kind_of(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
