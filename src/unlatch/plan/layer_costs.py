"""What the three tasks of each layer cost, in any unit of time, and the JSON file in which such costs are kept.

Training a layer is three tasks: F (forward), D (gradient of its input) and G (gradient of its weights). The first layer
has no D, because nobody asks for the gradient of the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, PlainValidator, TypeAdapter, ValidationError

from ..errors import PlanError
from ..io.json_file import read_json
from ..lookup import did_you_mean

__all__ = [
    "LayerCost",
    "Number",
    "as_chain",
    "exact",
    "layer_costs_from_json",
    "layer_costs_to_json",
    "plain",
    "read_layer_costs",
    "total_work",
    "write_layer_costs",
]

#: Integers and fractions are kept exact by every planner.
Number: TypeAlias = int | float | Fraction


@dataclass(frozen=True)
class LayerCost:
    """Time of the three tasks of one layer for one mini-batch, and bytes.

    >>> LayerCost("conv1", F=3, D=3, G=4).backward
    7
    """

    name: str
    F: Number
    #: Gradient of the layer's input; ignored for the first layer.
    D: Number
    G: Number
    #: Output of the layer; the gradient of the output is as large.
    activation_bytes: Number = 0
    weight_bytes: Number = 0
    #: The part of D that multiplies elementwise with the derivative of the activation function of the layer below.
    hadamard: Number = 0
    #: What must be kept from F to G; by default the layer's input.
    kept_bytes: Number | None = None
    #: The share of F, D and G that a part of a batch costs whole, however small: starting operations, for one.
    fixed: Number = 0

    @property
    def backward(self) -> Number:
        """Both gradients together."""
        return self.D + self.G

    @property
    def work(self) -> Number:
        """All three tasks together."""
        return self.F + self.D + self.G

    def share(self, parts: int) -> LayerCost:
        """What one of `parts` equal parts of the batch costs; weights stay whole.

        >>> half = LayerCost("conv1", F=8, D=8, G=8, activation_bytes=8, fixed=Fraction(1, 4)).share(2)
        >>> int(half.F), int(half.activation_bytes)
        (5, 4)
        """

        def part(value: Number, whole: Number = 0) -> Number:
            rest = (1 - whole) * value
            return value * whole + (rest / parts if isinstance(rest, float) else Fraction(rest, parts))

        return LayerCost(
            self.name,
            part(self.F, self.fixed),
            part(self.D, self.fixed),
            part(self.G, self.fixed),
            part(self.activation_bytes),
            self.weight_bytes,
            part(self.hadamard, self.fixed),
            None if self.kept_bytes is None else part(self.kept_bytes),
        )

    def with_part(self, part: LayerCost, parts: int) -> LayerCost:
        """The same costs, with the share that is fixed as one of `parts` equal parts of the batch shows it.

        >>> LayerCost("conv1", F=8, D=8, G=8).with_part(LayerCost("conv1", F=5, D=5, G=5), 2).fixed
        0.25
        """
        if not self.work or parts < 2:
            return self
        found = (parts * float(part.work) / float(self.work) - 1) / (parts - 1)
        return replace(self, fixed=min(max(found, 0.0), 1.0))


#: Costs between which all planners compute without overflow.
SMALLEST, LARGEST = 1e-100, 1e100

_TIMES = ("F", "D", "G", "hadamard")
_BYTES = ("activation_bytes", "weight_bytes", "kept_bytes")


def _cost(value: object) -> int | float:
    """A number of a file, whole if it is written so; planners compute exactly with whole ones."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, got {_short(value)}")
    if not 0 <= value < math.inf:
        raise ValueError(f"must be finite and not negative, got {_short(value)}")
    if value and not SMALLEST <= value <= LARGEST:
        raise ValueError(
            f"must be 0 or between {SMALLEST:g} and {LARGEST:g}, where sums and quotients are safe, got "
            f"{_short(value)}: choose another unit"
        )
    return value


_Cost = Annotated[int | float, PlainValidator(_cost)]


class _Layer(BaseModel):
    """A `LayerCost` as JSON: nothing is converted, nothing unknown is passed over."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str
    F: _Cost
    D: _Cost
    G: _Cost
    activation_bytes: _Cost = 0
    weight_bytes: _Cost = 0
    hadamard: _Cost = 0
    kept_bytes: _Cost | None = None
    fixed: _Cost = 0


_FILE = TypeAdapter(list[_Layer])
_KNOWN = tuple(_Layer.model_fields)
_REQUIRED = tuple(name for name, field in _Layer.model_fields.items() if field.is_required())


def as_chain(costs: Sequence[LayerCost]) -> list[LayerCost]:
    """The costs of a whole chain, with the D of the first layer set to zero.

    >>> as_chain([LayerCost("a", 1, 9, 1), LayerCost("b", 1, 1, 1)])[0].D
    0
    """
    if not costs:
        raise PlanError("there are no layers to plan: expected the costs of at least one")
    layers = [replace(costs[0], D=0, hadamard=0), *costs[1:]]
    for position, layer in enumerate(layers):
        for field in (*_TIMES, *_BYTES):
            value = getattr(layer, field)
            # Compared, not converted: an integer may be too large for a float.
            if value is not None and not 0 <= value < math.inf:
                raise PlanError(f"{_where(position, layer.name)}: {field} must be finite and not negative, got {value}")
        if not 0 <= layer.fixed <= 1:
            raise PlanError(f"{_where(position, layer.name)}: fixed is a share from 0 to 1, got {layer.fixed}")
        if layer.hadamard > layer.D:
            raise PlanError(
                f"{_where(position, layer.name)}: hadamard is a part of D, but {layer.hadamard} is more than {layer.D}"
            )
    if not any(layer.work for layer in layers):
        raise PlanError("all costs are zero: there is nothing to plan")
    return layers


def total_work(costs: Sequence[LayerCost]) -> Number:
    """F + D + G over all layers, without the D of the first.

    >>> total_work([LayerCost("a", 1, 9, 1), LayerCost("b", 1, 1, 1)])
    5
    """
    return sum((layer.work for layer in as_chain(costs)), start=0)


def exact(value: Number) -> Fraction:
    """A number as a fraction; a float stands for the decimal number it is written as.

    >>> exact(0.1) + exact(0.2) == exact(0.3)
    True
    """
    return Fraction(repr(float(value))) if isinstance(value, float) else Fraction(value)


def plain(value: Number) -> int | float:
    """A number as JSON has it: whole if it is whole.

    >>> plain(Fraction(11, 2)), plain(Fraction(4))
    (5.5, 4)
    """
    return int(value) if math.isfinite(value) and value == int(value) else float(value)


def layer_costs_from_json(data: Any, source: str = "costs") -> list[LayerCost]:
    """Layer costs from a list of objects with `name`, `F`, `D`, `G`, and optionally `activation_bytes`, `weight_bytes`.

    **Arguments:**

    - `data`: what `json.loads` gave.
    - `source`: how error texts call it.

    >>> layer_costs_from_json([{"name": "fc", "F": 1, "G": 2}])
    [LayerCost(name='fc', F=1, D=0, G=2, activation_bytes=0, weight_bytes=0, hadamard=0, kept_bytes=None, fixed=0)]
    """
    if not isinstance(data, list) or not data:
        raise PlanError(
            f'{source}: expected a list of layers, [{{"name": ..., "F": ..., "D": ..., "G": ..., "activation_bytes": '
            f'..., "weight_bytes": ...}}, ...], got {"an empty list" if data == [] else type(data).__name__}'
        )
    try:
        found = _FILE.validate_python([_without_input_gradient(data[0]), *data[1:]])
        layers = as_chain([LayerCost(**dict(one)) for one in found])
    except ValidationError as error:
        first, *others = [_explain(problem, data) for problem in error.errors(include_url=False)]
        more = f" (and {len(others)} more)" if others else ""
        raise PlanError(f"{source}: {first}{more}") from None
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None
    places: dict[str, int] = {}
    for position, layer in enumerate(layers):
        if places.setdefault(layer.name, position) != position:
            raise PlanError(
                f"{source}: layers {places[layer.name]} and {position} are both called {layer.name!r}: "
                "plans name layers, so give each a name of its own"
            )
    return layers


def layer_costs_to_json(costs: Sequence[LayerCost]) -> list[dict[str, Any]]:
    """The inverse of `layer_costs_from_json`; fractions become floats, optional fields are left out if not set."""
    entries = []
    for layer in costs:
        fields = {key: value for key, value in asdict(layer).items() if value is not None}
        for name in ("hadamard", "fixed"):
            if not fields[name]:
                del fields[name]
        entries.append({k: float(v) if isinstance(v, Fraction) else v for k, v in fields.items()})
    return entries


def read_layer_costs(path: str | Path) -> list[LayerCost]:
    """Layer costs from a JSON file."""
    return layer_costs_from_json(read_json(path, "costs file", PlanError), str(path))


def write_layer_costs(path: str | Path, costs: Sequence[LayerCost]) -> None:
    """Write the file that `read_layer_costs` reads, one layer per line."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in layer_costs_to_json(costs))
    Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _without_input_gradient(entry: Any) -> Any:
    """The first layer has no D, whatever a file says of it."""
    return {**entry, "D": 0, "hadamard": 0} if isinstance(entry, Mapping) else entry


def _explain(problem: Mapping[str, Any], data: Sequence[Any]) -> str:
    position, *key = problem["loc"]
    entry, field = data[position], str(key[0]) if key else ""
    where = _where(position, entry.get("name") if isinstance(entry, Mapping) else None)
    match problem["type"]:
        case "model_type":
            return f"{where}: expected an object with {', '.join(_REQUIRED)}, got {type(entry).__name__}"
        case "missing":
            return f"{where}: {field} missing; a layer needs {', '.join(_REQUIRED)}"
        case "extra_forbidden" | "invalid_key":
            return f"{where}: unknown key {_short(field)}.{did_you_mean(field, _KNOWN)} Known: {', '.join(_KNOWN)}"
        case "value_error":
            return f"{where}: {field} {problem['ctx']['error']}"
    return f"{where}: {field} must be a text, got {_short(problem['input'])}"


def _where(position: int, name: object) -> str:
    return f"layer {position}" + (f" ({_short(name)})" if name is not None else "")


def _short(value: object) -> str:
    """A value from a file as errors show it: nobody wants to read a page of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
