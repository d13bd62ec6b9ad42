"""Options of every registered method are checked by their annotations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_args, get_origin, get_type_hints

import pytest

from unlatch import methods
from unlatch.errors import ConfigError
from unlatch.methods.base import METHODS, Method
from unlatch.methods.options import choices, owner

WORDS = [(name, field.name) for name in methods.names() for field in fields(METHODS[name])]


@pytest.mark.parametrize(("name", "option"), [pair for pair in WORDS if choices(METHODS[pair[0]], pair[1])])
def test_a_word_that_is_none_of_the_choices_is_refused_with_all_of_them(name, option):
    with pytest.raises(ConfigError) as error:
        methods.get(name, **{option: "sideways"})
    assert str(error.value).startswith(f"{name}: {option} must be ")
    assert all(word in str(error.value) for word in choices(METHODS[name], option))
    assert str(error.value).endswith("got 'sideways'")


def _plain(hint: object) -> type | None:
    kind = getattr(hint, "__origin__", hint) if get_origin(hint) is not None and get_args(hint) else hint
    return kind if kind in (int, float, bool) else None


NUMBERS = [
    (name, option, _plain(hint))
    for name in methods.names()
    for option, hint in get_type_hints(METHODS[name], include_extras=True).items()
    if option in METHODS[name].__dataclass_fields__ and _plain(hint)
]


@pytest.mark.parametrize(("name", "option", "kind"), NUMBERS)
def test_a_value_of_another_kind_is_refused(name, option, kind):
    for wrong in ("many", None, 1 if kind is bool else True, *([1.5] if kind is int else [])):
        with pytest.raises(ConfigError, match=f"{name}: {option} must "):
            methods.get(name, **{option: wrong})


def test_bounds_and_alternatives_are_named():
    with pytest.raises(ConfigError, match=r'^dtr: microbatches must be "auto" or a whole number, at least 1, got 0$'):
        methods.DTR(microbatches=0)
    with pytest.raises(ConfigError, match=r"^bp: accumulate must be a whole number, at least 1, got 0$"):
        methods.BP(accumulate=0)
    with pytest.raises(ConfigError, match=r"^layerpipe: extra_delay must be a whole number, at least 0, got -1$"):
        methods.LayerPipe(extra_delay=-1)


def test_annotations_that_cannot_be_looked_up_are_left_to_their_owner():
    class Unseen:
        pass

    @dataclass(frozen=True)
    class Inside(methods.DTR):
        extra: Unseen | None = None

    assert Inside(extra=3).extra == 3
    with pytest.raises(ConfigError, match="accumulate must be"):
        Inside(accumulate="all")


def test_an_option_belongs_to_the_class_that_introduced_it():
    assert owner(methods.DTRP, "predict") is owner(methods.FDG, "predict") is methods.Delayed
    assert owner(methods.AuxNet, "microbatches") is Method
    assert owner(methods.FDG, "weights") is not owner(methods.PETRA, "weights")
    assert owner(methods.BP, "beta") is None
