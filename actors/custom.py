"""Actors of the user's own: replace a box, insert a stage on an arrow, tap an arrow, or stand free."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from actors.runtime.actor import Runnable
from actors.runtime.arrow import Arrow, Insert, Tap
from actors.runtime.child import Child, permanent, temporary, transient
from actors.runtime.ends import Inbox, Outbox
from actors.runtime.latest import Latest
from protocols.errors import ProfileError
from protocols.profile import ActorSection, Profile
from protocols.weights import WeightsReady


class Services(Struct, frozen=True, kw_only=True):
    """What an actor of the user's own may use beside its mailboxes.

    sampler: the policy's own completions (`actors.sampler.Sampler`); weights: which version serves; tokenizer: of the
    policy (`actors.compute.tokenizer.ChatTokenizer`); directory: of the run, for files of its own.
    """

    profile: Profile
    directory: Path
    sampler: Any
    tokenizer: Any
    weights: Latest[WeightsReady]


class CustomActors:
    """The `[[actors]]` of a profile, ready to take their places in the topology.

    A factory is called with `name`, `services`, the `options` of its stanza, and the ends of its place: `inbox` and
    `outbox` for a stage, `inbox` for a tap, none for a free-standing actor, and for a replacement exactly those of the
    box it replaces. It returns anything with a `name` and an `async run()`.
    """

    def __init__(self, sections: Sequence[ActorSection], services: Services) -> None:
        """Import every factory. Raises ProfileError naming the stanza whose factory cannot be."""
        self._services = services
        self._sections = [(section, load_factory(section)) for section in sections]

    def box(self, name: str, default: Callable[..., Runnable], **ends: Any) -> Child:
        """The box of that name with its ends, as a child: the user's if the profile replaces it, else the default."""
        for section, factory in self._sections:
            if section.mode == "replace" and section.at == name:
                return self._child(section, factory, **ends)
        return temporary(default(**ends)) if name == "monitor" else transient(default(**ends))

    def arrow(self, name: str, capacity: int) -> Arrow[Any]:
        """An arrow with the actors that the profile puts on it, stages first, each in the profile's order."""
        return Arrow(name, capacity=capacity, inserts=self._inserts(name), taps=self._taps(name))

    def _inserts(self, arrow: str) -> list[Insert]:

        def insert(section: ActorSection, factory: Factory) -> Insert:
            return lambda inbox, outbox: self._child(section, factory, inbox=inbox, outbox=outbox)

        return [insert(section, factory) for section, factory in self._at("insert", arrow)]

    def _taps(self, arrow: str) -> list[Tap]:

        def tap(section: ActorSection, factory: Factory) -> Tap:
            return lambda inbox: self._child(section, factory, inbox=inbox)

        return [tap(section, factory) for section, factory in self._at("tap", arrow)]

    def free_standing(self) -> list[Child]:
        """The actors on no arrow."""
        return [self._child(section, factory) for section, factory in self._at("add", "")]

    def _at(self, mode: str, place: str) -> list[tuple[ActorSection, Factory]]:
        return [
            (section, factory) for section, factory in self._sections if (section.mode, section.at) == (mode, place)
        ]

    def _child(self, section: ActorSection, factory: Factory, **ends: Inbox[Any] | Outbox[Any]) -> Child:
        try:
            actor = factory(name=section.name, services=self._services, **ends, **section.options)
        except TypeError as error:
            given = ", ".join(("name", "services", *ends, *section.options))
            raise ProfileError(
                f"actors: {section.factory} cannot be made with the arguments {given} ({error}); see docs/actors.md"
            ) from error
        match section.restart or ("transient" if section.stands_on_the_flow else "temporary"):
            case "permanent":
                return permanent(actor, max_restarts=3)
            case "transient":
                return transient(actor)
            case "temporary":
                return temporary(actor)


Factory = Callable[..., Runnable]


def load_factory(section: ActorSection) -> Factory:
    """Import `module:Class`, the current directory included. Raises ProfileError that says what failed."""
    module_name, _, attribute = section.factory.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise ProfileError(
            f"actors: {section.name!r}: {section.factory} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(factory):
        raise ProfileError(f"actors: {section.name!r}: {section.factory} is a {type(factory).__name__}, not a class")
    made: Factory = factory
    return made
