"""What the user says about `torch.compile`, and what cannot be compiled, refused before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ..lookup import did_you_mean
from ..methods import Method
from ..nn.chain import StageChain, cut
from ..nn.compiled import Compilation
from ..nn.coupling import Coupling
from ..runtime.blueprint import Blueprint
from ..schedule import Schedule

__all__ = ["DEFAULT_BACKEND", "check_compile", "read_compile"]

_KEYS = ("backend", "mode", "options", "fullgraph", "dynamic")
#: What compiles if nobody says what.
DEFAULT_BACKEND = "inductor"


def read_compile(asked: bool | str | Mapping[str, Any], device: str) -> Compilation | None:
    """What `compile=` means on this kind of device; `None` if nothing is to be compiled.

    >>> read_compile(False, "cpu"), read_compile("aot_eager", "cpu").backend
    (None, 'aot_eager')
    """
    if isinstance(asked, bool | str):
        asked = {"backend": DEFAULT_BACKEND if asked is True else asked} if asked else {}
    elif not isinstance(asked, Mapping):
        raise ConfigError(f"compile must be True, the name of a backend or a dict of {', '.join(_KEYS)}, got {asked!r}")
    elif not asked:
        raise ConfigError(f"compile is empty: say True, the name of a backend, or at least one of {', '.join(_KEYS)}")
    if not asked:
        return None
    for key in asked:
        if key not in _KEYS:
            raise ConfigError(f"compile has no {key!r}.{did_you_mean(str(key), _KEYS)} Known: {', '.join(_KEYS)}")
    for key, kind in (("backend", str), ("mode", str), ("options", Mapping), ("fullgraph", bool), ("dynamic", bool)):
        if key in asked and not isinstance(asked[key], kind):
            raise ConfigError(f"compile: {key} must be a {kind.__name__.lower()}, got {asked[key]!r}")
    backend = asked.get("backend", DEFAULT_BACKEND)
    options = _options(backend, asked.get("mode"), asked.get("options", {}))
    if backend == DEFAULT_BACKEND and device == "cpu":
        _check_compiler()
    return Compilation(backend, asked.get("fullgraph", True), asked.get("dynamic", False), options)


def _options(backend: str, mode: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"torch has no backend {backend!r} to compile with.{did_you_mean(backend, known)} Known: {', '.join(known)}"
        )
    if mode is not None and backend != DEFAULT_BACKEND:
        raise ConfigError(f"compile: only {DEFAULT_BACKEND!r} has modes, got mode={mode!r} for backend {backend!r}")
    options = dict(given)
    if backend == DEFAULT_BACKEND:
        # Torch takes a mode or options. Dropout masks are those of an uncompiled run, unless told otherwise.
        options = {"fallback_random": True, **_mode(mode), **options}
    if backend == "cudagraphs" or options.get("triton.cudagraphs"):
        raise ConfigError(
            "compile: CUDA graphs read weights where they were first and write every output to the same memory, while "
            'stages keep several batches and versions of weights: take mode="max-autotune-no-cudagraphs" or the default'
        )
    return options


def _mode(mode: str | None) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    modes: dict[str, dict[str, Any]] = list_mode_options()
    if mode is not None and mode not in modes:
        raise ConfigError(f"compile: there is no mode {mode!r}.{did_you_mean(mode, modes)} Known: {', '.join(modes)}")
    return modes[mode] if mode is not None else {}


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "compile: on the CPU torch's inductor needs a C++ compiler, and finds none on this machine: install one "
            "(g++), name one in the environment variable CXX, or leave compile off"
        ) from None


def check_compile(blueprint: Blueprint, method: Method, schedule: Schedule) -> None:
    """Refuse methods and models that need what compiling takes away."""
    if blueprint.options.compilation is None:
        return
    rules, parts = method.rules(), cut(blueprint.blocks, blueprint.plan.starts)
    modules = [StageChain(part, blueprint.model) for part in parts]
    if any(entry.kind.cost in ("input gradient", "weight gradient") for entry in schedule.entries):
        why = "does the two halves of a backward apart, and compiled code has only one backward for both"
    elif method.repeats_backward:
        why = "goes backward twice through one graph, and compiled code writes over what it saved the first time"
    elif any(isinstance(part, Coupling) for module in modules for part in module.modules()):
        why = "would train reversible couplings, which draw and replay random numbers while they run"
    elif any(rules.activation.at(i, len(modules), module).inverts for i, module in enumerate(modules)):
        why = "computes inputs back from outputs, block by block, and compiled code has no blocks"
    elif rules.activation.keeps_graph and rules.backward.replaces_saved and len(modules) > 1:
        why = (
            f'gives a kept graph other weights (weights="{rules.backward.name}"), and compiled code keeps what it made '
            "of weights as well"
        )
    else:
        return
    raise ConfigError(f"compile: {method.name} {why}: leave compile off here")
