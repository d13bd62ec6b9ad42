"""What a result depends on besides the settings: versions of software, platform, threads."""

from __future__ import annotations

import importlib.metadata
import os
import platform

__all__ = ["versions"]

_PACKAGES = ("unlatch", "torch", "numpy", "scipy", "safetensors", "pydantic", "scikit-learn")


def versions() -> dict[str, str | int]:
    """Everything worth writing beside a result, ready for JSON.

    >>> sorted(versions())[:3]
    ['cores', 'interop_threads', 'machine']
    """
    # Whoever only reads a run's folder does not wait for it.
    import torch

    return {
        "python": platform.python_version(),
        **{package: _installed(package) for package in _PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
    }


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Running from the sources without an install is legitimate.
        return "not installed"
