"""What is wrong with a setting, in plain words: where, what was expected, what came, which name was likely meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from .lookup import nearest

__all__ = ["explain", "hint"]

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
}
#: What settings are called elsewhere.
_ALSO_CALLED = {
    "train_size": "subset",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "world_size": "processes",
    "num_stages": "stages",
    "grad_clip": "clip_grad_norm",
    "max_grad_norm": "clip_grad_norm",
    "gradient_clip_val": "clip_grad_norm",
    "loss_fn": "loss",
    "dtype": "precision",
    "scheduler": "shape",
    "lr_scheduler": "shape",
}
_KINDS = {bool: "true/false", int: "whole number", float: "number", str: "text", list: "list", dict: "table"}


def hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A near miss if there is one, else the list of what is known.

    >>> hint("momentun", ["lr", "momentum"])
    "; did you mean 'momentum'?"
    >>> hint("zzz", ["lr", "momentum"])
    '; known: lr, momentum'
    """
    known = list(known)
    other = _ALSO_CALLED.get(name)
    near = other if other in known else nearest(name, known)
    if near is not None:
        return f"; did you mean '{prefix}{near}'?"
    return "; known: " + ", ".join(sorted(known)) if known else ""


def explain(error: ValidationError, config: type[BaseModel] | None = None) -> list[str]:
    """One line per problem, each naming the setting by its dotted path.

    **Arguments:** `config`: what has sections with settings; without it the words are those of a JSON file.
    """
    sections = _keys(config) if config is not None else None
    lines = [_explain_one(problem, sections) for problem in error.errors(include_url=False)]
    return list(dict.fromkeys(lines))


def _keys(config: type[BaseModel]) -> dict[str, set[str]]:
    annotations: dict[str, Any] = {name: info.annotation for name, info in config.model_fields.items()}
    return {name: set(section.model_fields) for name, section in annotations.items()}


def _explain_one(problem: Mapping[str, Any], sections: Mapping[str, set[str]] | None) -> str:
    # Only sections, keys and list positions: pydantic also puts its own names for members of a union here.
    path = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("function-", "tuple[")))
    kind = problem["type"]
    if kind == "extra_forbidden" and sections is not None:
        return _unknown(path, problem["loc"], sections)
    if kind == "missing":
        return (
            f"{path}: missing, and there is no default"
            if "." in path or sections is None
            else f"the section [{path}] is missing"
        )
    if kind == "value_error":
        text = str(problem["ctx"]["error"])
        return text if not path or text.startswith(f"{path}.") else f"{path}: {text}"
    if kind in ("model_type", "model_attributes_type") and sections is not None and "." not in path:
        owner = next((section for section, keys in sections.items() if path in keys), None)
        meant = f"; did you mean '{owner}.{path}'?" if owner is not None else ""
        return f"{path}: expected {_EXPECTED[kind]}, got {_show(problem['input'])}{meant}"
    expected = "an object" if kind == "model_type" and sections is None else _EXPECTED.get(kind)
    wanted = f"expected {expected.format(**problem.get('ctx', {}))}" if expected else problem["msg"].lower()
    return f"{path}: {wanted}, got {_show(problem['input'])}"


def _unknown(path: str, location: tuple[Any, ...], sections: Mapping[str, set[str]]) -> str:
    if len(location) == 1:
        name = str(location[0])
        owner = next((section for section, keys in sections.items() if name in keys), None)
        if owner is not None:
            return f"unknown section or key '{name}'; did you mean '{owner}.{name}'?"
        return f"unknown section '{name}'{hint(name, sections)}"
    section, name = str(location[0]), str(location[-1])
    known, meant = sections.get(section, set()), _ALSO_CALLED.get(name, name)
    elsewhere = next((other for other, keys in sections.items() if meant in keys), None)
    if meant not in known and elsewhere is not None and (meant != name or nearest(name, known) is None):
        return f"unknown key '{path}'; did you mean '{elsewhere}.{meant}'?"
    return f"unknown key '{path}'{hint(name, known, f'{section}.')}"


def _show(value: Any) -> str:
    kind = _KINDS.get(type(value), type(value).__name__)
    shown = repr(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else str(value).lower()
    shown = shown if len(shown) <= 100 else f"{shown[:60]}... ({len(shown)} characters)"
    return f"{shown} ({kind})" if isinstance(value, str | int | float | bool) else f"a {kind}"
