"""Messages between actors, and the interfaces that they implement. Only msgspec and the standard library."""

from __future__ import annotations

from msgspec import Meta, Struct, structs


def about(description: str) -> Meta:
    """The annotation of a field with what its key means."""
    return Meta(description=description)


def descriptions(kind: type[Struct]) -> dict[str, str]:
    """Return what each key of a struct means, by its name in the file."""
    return {field.encode_name: field.type.__metadata__[0].description for field in structs.fields(kind)}
