"""What the sections of a profile share: descriptions, numbers by range, and types of a tagged union."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


def about(description: str, **constraints: Any) -> Meta:
    """The annotation of a key: its description, and constraints as in `msgspec.Meta`."""
    return Meta(description=description, **constraints)


Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0.0)]
NonNegativeFloat = Annotated[float, Meta(ge=0.0)]
ZERO_IS_OFF = {"zero_is_off": True}
"""Marks a number of which 0 says that it is not used, so that a profile may write `off` or `none`."""
ZeroIsOff = Annotated[int, Meta(ge=0, extra=ZERO_IS_OFF)]
ZeroIsOffFloat = Annotated[float, Meta(ge=0.0, extra=ZERO_IS_OFF)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
PositiveFraction = Annotated[float, Meta(gt=0.0, le=1.0)]
FractionBelowOne = Annotated[float, Meta(ge=0.0, lt=1.0)]
AboveOne = Annotated[float, Meta(gt=1.0)]
ModuleName = Annotated[str, Meta(pattern=r"^[\w.]+:\w+$", title="module:name")]


class Variant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """One type of a tagged union. The key `type` of the table names it."""


class Off(Variant, frozen=True, kw_only=True, tag="off"):
    """Disabled."""
