"""Auxiliary variables that are stored for every sample, recognised by its content."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import DataError
from ...nn.tree import flatten
from ...transport.mail import Micro
from .mismatch import corrected, relaxed_multiplier
from .records import BorderValues
from .sources import Raw, Source

if TYPE_CHECKING:
    from .auxvar import AuxVar

__all__ = ["Roster", "TableSource", "sample_keys"]

_KEY_BYTES = 12


def sample_keys(x: Any) -> list[bytes]:
    """One short hash per sample.

    >>> a, b = sample_keys(torch.tensor([[1.0], [1.0]]))
    >>> a == b
    True
    """
    columns = [t.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy() for t in flatten(x)[0]]
    return [
        hashlib.blake2b(b"".join(column[row].tobytes() for column in columns), digest_size=_KEY_BYTES).digest()
        for row in range(len(columns[0]))
    ]


class Roster:
    """Which samples are known; every worker keeps the same one, so that all agree on what to do with a batch.

    **Arguments:** `capacity`: samples that may be known.
    """

    def __init__(self, capacity: int) -> None:
        self.rows: dict[bytes, int] = {}
        self._capacity = capacity

    def unknown(self, keys: list[bytes]) -> bool:
        """Whether any of these samples is new."""
        return any(key not in self.rows for key in keys)

    def enter(self, keys: list[bytes], stage: int) -> list[int]:
        """The rows of these samples; new ones get the next free rows."""
        for key in keys:
            self.rows.setdefault(key, len(self.rows))
        if len(self.rows) > self._capacity:
            raise DataError(
                f"stage {stage} has met {len(self.rows)} different samples, more than the {self._capacity} it may "
                "store: stored auxiliary variables need data that stays the same from epoch to epoch. Turn "
                "augmentation off, raise "
                'capacity, or use the method "auxnet".'
            )
        return [self.rows[key] for key in keys]

    def tensors(self) -> dict[str, Tensor]:
        """Whose rows these are, for a checkpoint."""
        if not self.rows:
            return {}
        return {"keys": torch.frombuffer(bytearray(b"".join(self.rows)), dtype=torch.uint8).view(-1, _KEY_BYTES)}

    def load_tensors(self, found: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        keys = found["keys"].cpu() if "keys" in found else ()
        self.rows = {bytes(key.tolist()): row for row, key in enumerate(keys)}


class TableSource(Source):
    """A table of inputs (and multipliers) with one row per sample.

    **Arguments:** `stage`: whose inputs these are.
    """

    def __init__(self, method: AuxVar, stage: int, roster: Roster) -> None:
        super().__init__(method)
        self.roster = roster
        self._stage = stage
        self._inputs: Tensor | None = None
        self._multipliers: Tensor | None = None
        self._used = 0

    def predict(self, micro: Micro, raw: Raw, *, keep: bool) -> Tensor:
        assert self._inputs is not None
        return self._inputs[self._rows(raw)]

    def multiplier(self, raw: Raw) -> Tensor | None:
        return None if self._multipliers is None else self._multipliers[self._rows(raw)]

    def _rows(self, raw: Raw) -> list[int]:
        return self.roster.enter(sample_keys(raw.x), self._stage)

    def store(self, raw: Raw, x: Tensor, *, only_new: bool = False) -> None:
        """Set the inputs of these samples to the state of a serial pass; new samples start without multiplier."""
        before = self._used
        rows = torch.tensor(self._rows(raw), device=x.device)
        self._grow(x, len(self.roster.rows))
        self._used = len(self.roster.rows)
        assert self._inputs is not None
        chosen = rows >= before if only_new else torch.ones_like(rows, dtype=torch.bool)
        self._inputs[rows[chosen]] = x.detach()[chosen]

    def _grow(self, like: Tensor, rows: int) -> None:
        """Make room; at least half as much again, so that growing stays cheap."""
        if self._inputs is None:
            self._inputs = like.new_zeros((0, *like.shape[1:]))
            if self.method.form == "lagrangian":
                self._multipliers = self._inputs.clone()
        if rows > len(self._inputs):
            room = max(rows, len(self._inputs) * 3 // 2) - len(self._inputs)
            missing = like.new_zeros((room, *like.shape[1:]))
            self._inputs = torch.cat([self._inputs, missing])
            if self._multipliers is not None:
                self._multipliers = torch.cat([self._multipliers, missing])

    def correct(self, micro: Micro, raw: Raw, values: BorderValues) -> None:
        assert self._inputs is not None
        assert values.x is not None
        method, rows = self.method, self._rows(raw)
        weight = values.beta * method.imitate
        aim = corrected(values.lam, self.jump(values), method.theta, weight, self.rule.stiffness(values.lam))
        self._inputs[rows] = aim
        if self._multipliers is not None and values.p is not None:
            seed = -(values.beta * method.pull) * self.rule.gradient(values.lam, values.x)
            if values.kappa is not None:
                seed = seed + values.kappa
            self._multipliers[rows] = relaxed_multiplier(seed, values.p, method.theta)

    def distil(self, micro: Micro, raw: Raw, x: Tensor) -> None:
        if not self.roster.unknown(sample_keys(raw.x)):
            self.store(raw, x)

    def tensors(self) -> dict[str, Tensor]:
        found = {"inputs": self._inputs, "multipliers": self._multipliers}
        return {name: t[: self._used] for name, t in found.items() if t is not None}

    def load_tensors(self, found: dict[str, Tensor]) -> None:
        self._inputs = found["inputs"].clone() if "inputs" in found else None
        self._used = len(found.get("inputs", ()))
        self._multipliers = None
        if self._inputs is not None and self.method.form == "lagrangian":
            # A run that went on without multipliers so far starts them at zero.
            self._multipliers = (
                found["multipliers"].clone() if "multipliers" in found else self._inputs.new_zeros(self._inputs.shape)
            )
