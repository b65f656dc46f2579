"""Actors of the user's own: replace a box, insert a stage on an arrow, tap an arrow, or stand free."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from clotho.config.schema import ActorSection, Profile
from clotho.runtime.actor import Runnable
from clotho.runtime.child import Child, Restart, temporary, transient
from clotho.runtime.edges import Arrow, Insert, Tap
from clotho.runtime.latest import Latest
from clotho.runtime.user_code import import_user_module
from protocols.errors import ProfileError
from protocols.queues import Closable
from protocols.step import WeightsReady

MAX_RESTARTS = 3
"""Of a permanent actor, within a minute; one more failure is the run's."""


class Services(Struct, frozen=True, kw_only=True):
    """What an actor of the user's own may use beside its mailboxes.

    sampler: the policy's own completions (`clotho.runtime.sampling_client.Sampler`); weights: which version serves;
    tokenizer: of the policy (`clotho.models.tokenizer.ChatTokenizer`); directory: of the run.
    default: for a replacement, the box it replaces as a `functools.partial`: called with the ends, it makes that box;
    its `keywords` are what the box is made with besides. None for everybody else.
    """

    profile: Profile
    directory: Path
    sampler: Any
    tokenizer: Any
    weights: Latest[WeightsReady]
    default: Callable[..., Runnable] | None = None


class CustomActors:
    """The `[[actors]]` of a profile, ready to take their places in the topology.

    A factory is called with `name`, `services`, the `options` of its stanza, and the ends of its place: `inbox` and
    `outbox` for a stage, `inbox` for a tap, none for a free-standing actor, and for a replacement exactly those of the
    box it replaces. It returns anything with that `name` and an `async run()`. Ends that it leaves open are closed when
    it has ended, so that nobody waits for it.

    boxes: the actor that stands at each box, the user's or the default, by the box's name.
    """

    def __init__(self, sections: Sequence[ActorSection], services: Services) -> None:
        """Import every factory. Raises ProfileError naming the stanza whose factory cannot be."""
        self._services = services
        self.boxes: dict[str, Runnable] = {}
        self._sections = [(section, load_factory(section)) for section in sections]

    def box(self, name: str, default: Callable[..., Runnable], **ends: Any) -> Child:
        """The box of that name with its ends, as a child: the user's if the profile replaces it, else the default."""
        child = self._replacement(name, default, ends)
        if child is None:
            box = default(**ends)
            child = temporary(box, ends_with_input=True) if name == "monitor" else transient(box)
        self.boxes[name] = child.actor
        return child

    def _replacement(self, name: str, default: Callable[..., Runnable], ends: dict[str, Any]) -> Child | None:
        for section, factory in self._at("replace", name):
            return self._child(section, factory, ends, default)
        return None

    def arrow(self, name: str, capacity: int) -> Arrow[Any]:
        """An arrow with the actors that the profile puts on it, stages first, each in the profile's order."""
        return Arrow(name, capacity=capacity, inserts=self._inserts(name), taps=self._taps(name))

    def _inserts(self, arrow: str) -> list[Insert]:

        def insert(section: ActorSection, factory: Factory) -> Insert:
            return lambda inbox, outbox: self._child(section, factory, {"inbox": inbox, "outbox": outbox})

        return [insert(section, factory) for section, factory in self._at("insert", arrow)]

    def _taps(self, arrow: str) -> list[Tap]:

        def tap(section: ActorSection, factory: Factory) -> Tap:
            return lambda inbox: self._child(section, factory, {"inbox": inbox})

        return [tap(section, factory) for section, factory in self._at("tap", arrow)]

    def free_standing(self) -> list[Child]:
        """The actors on no arrow."""
        return [self._child(section, factory, {}) for section, factory in self._at("add", "")]

    def _at(self, mode: str, place: str) -> list[tuple[ActorSection, Factory]]:
        return [
            (section, factory) for section, factory in self._sections if (section.mode, section.at) == (mode, place)
        ]

    def _child(
        self,
        section: ActorSection,
        factory: Factory,
        ends: dict[str, Any],
        default: Callable[..., Runnable] | None = None,
    ) -> Child:
        services = structs.replace(self._services, default=default)
        restart = Restart(section.restart or ("transient" if section.stands_on_the_flow else "temporary"))
        return Child(
            actor=_make(section, factory, {"services": services, **ends}),
            restart=restart,
            max_restarts=MAX_RESTARTS if restart is Restart.PERMANENT else 0,
            keeps=tuple(_flat(ends.values())),
            ends_with_input=restart is Restart.TEMPORARY and "inbox" in ends,
        )


def _make(section: ActorSection, factory: Factory, parts: dict[str, Any]) -> Runnable:
    try:
        actor = factory(name=section.name, **parts, **section.options)
    except TypeError as error:
        given = ", ".join(("name", *parts, *section.options))
        raise ProfileError(
            f"actors: {section.factory} cannot be made with the arguments {given} ({error}); see docs/actors.md"
        ) from error
    except Exception as error:
        raise ProfileError(f"actors: {section.factory} cannot be made: {type(error).__name__}: {error}") from error
    if getattr(actor, "name", None) != section.name or not inspect.iscoroutinefunction(getattr(actor, "run", None)):
        raise ProfileError(
            f"actors: {section.factory} made {type(actor).__name__!r}, which is no actor: it needs the name it is "
            f"given, {section.name!r}, and an async run(); see docs/actors.md"
        )
    return actor


def _flat(ends: Iterable[Any]) -> Iterator[Closable]:
    """Every end by itself: a box may hold several of a kind."""
    for end in ends:
        if isinstance(end, list):
            yield from end
        else:
            yield end


Factory = Callable[..., Runnable]


def load_factory(section: ActorSection) -> Factory:
    """Import `module:Class`, the current directory included. Raises ProfileError for what cannot be had."""
    if section.mode == "tap" and section.restart == "permanent":
        raise ProfileError(
            f"actors: {section.name!r} ends with the arrow it taps: restart must be 'temporary' (the run goes on "
            "without it) or 'transient' (its failure is the run's), not 'permanent'"
        )
    module_name, _, attribute = section.factory.partition(":")
    try:
        factory = getattr(import_user_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise ProfileError(
            f"actors: {section.name!r}: {section.factory} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(factory):
        raise ProfileError(f"actors: {section.name!r}: {section.factory} is a {type(factory).__name__}, not a class")
    made: Factory = factory
    return made
