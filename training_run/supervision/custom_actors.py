"""Custom actors: the `[[actors]]` of a profile, which replace an actor, or process the messages of a queue."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from msgspec import Struct, structs

from clotho.extension import Door
from clotho.lanes.sampling_client import EngineSampler
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.bounds import Off
from clotho.user_code import import_user_module
from protocols.errors import ProfileError, did_you_mean
from protocols.queues import Inbox, Outbox, QueueClosed
from protocols.step import WeightsReady
from training_run.profile.rules import has_own_groups
from training_run.profile.schema import ActorSection, Profile
from training_run.supervision.latest import Latest
from training_run.supervision.lost_groups import PLACES, LostGroups
from training_run.supervision.queues import Queue, QueueEnd
from training_run.supervision.supervisor import Child, Restart, RestartPolicy, Runnable, temporary, transient

P = ParamSpec("P")
T = TypeVar("T")

PERMANENT_POLICY = RestartPolicy(max_restarts=3)
Factory = Callable[..., Runnable]


class ReplacedActor(Struct, frozen=True, kw_only=True, eq=False):
    """The actor that a custom actor replaces.

    actor_class: its class. arguments: the keyword arguments that it would be constructed with, its queue ends included.
    """

    actor_class: Callable[..., Runnable]
    arguments: Mapping[str, Any]

    def construct(self, actor_class: Callable[..., Runnable] | None = None, **changes: Any) -> Any:
        """Construct the replaced actor, or a subclass of it. changes: arguments to replace."""
        return (actor_class or self.actor_class)(**{**self.arguments, **changes})


class Services(Struct, frozen=True, kw_only=True):
    """What a custom actor may use besides its queue ends.

    directory: the run directory. sampler: completions of the policy. tokenizer: the policy's tokenizer.
    weights: the cell with the version of the served weights.
    replaced: with mode `replace`, the actor that is replaced; None in other modes.
    """

    profile: Profile
    directory: Path
    sampler: EngineSampler
    tokenizer: ChatTokenizer
    weights: Latest[WeightsReady]
    replaced: ReplacedActor | None = None


class Channel(Generic[T]):
    """A queue between two actors, with the custom actors that stages and taps add to it.

    Messages pass the inserted stages in order, then a tee copies them to each tap. Every queue on the way has the
    channel's capacity.

    queues: the queues that messages pass. copies: the queues of the taps. children: the actors in between.
    """

    def __init__(self, name: str, *, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self.queues: list[Queue[Any]] = [Queue(name, capacity=capacity)]
        self.copies: list[Queue[Any]] = []
        self.children: list[Child] = []

    def outbox(self) -> Outbox[T]:
        """Open the end of one producer."""
        return self.queues[0].outbox()

    def inbox(self) -> Inbox[T]:
        """Open the end of the consumer."""
        return self.queues[-1].inbox()

    def insert(self, make: Callable[[Inbox[Any], Outbox[Any]], Child]) -> None:
        """Add a stage: an actor that receives each message and sends it on, changed or not."""
        inbox, outbox = self._extend(f"{self.name}.{len(self.queues)}")
        self.children.append(make(inbox, outbox))

    def tap(self, taps: Sequence[Callable[[Inbox[Any]], Child]]) -> None:
        """Add actors that receive a copy of each message."""
        self.copies = [Queue(f"{self.name}.tap{number}", capacity=self.capacity) for number in range(1, len(taps) + 1)]
        inbox, outbox = self._extend(f"{self.name}.tapped")
        tee = Tee(f"{self.name} tee", inbox, outbox, [copy.outbox() for copy in self.copies])
        self.children.append(transient(tee))
        self.children += [make(copy.inbox()) for make, copy in zip(taps, self.copies, strict=True)]

    def _extend(self, name: str) -> tuple[Inbox[Any], Outbox[Any]]:
        inbox = self.queues[-1].inbox()
        self.queues.append(Queue(name, capacity=self.capacity))
        return inbox, self.queues[-1].outbox()


class Tee(Generic[T]):
    """Sends every message to each tap, then on.

    A full tap applies backpressure; a tap that has closed its inbox is skipped.
    """

    def __init__(self, name: str, inbox: Inbox[T], outbox: Outbox[T], copies: list[Outbox[T]]) -> None:
        """Takes ownership of all ends."""
        self.name = name
        self._inbox, self._outbox, self._copies = inbox, outbox, copies

    async def run(self) -> None:
        """Copy until the inbox ends."""
        try:
            async with self._inbox, self._outbox:
                async for item in self._inbox:
                    await self._copy(item)
                    await self._outbox.send(item)
        finally:
            for copy in self._copies:
                copy.close()

    async def _copy(self, item: T) -> None:
        for copy in tuple(self._copies):
            try:
                await copy.send(item)
            except QueueClosed:
                self._copies.remove(copy)


class CustomActors:
    """Places actors and channels, with the custom actors of the profile.

    A factory is called by keyword with `name`, `services`, the `options` of its stanza, and its queue ends: `inbox` and
    `outbox` for an inserted stage, `inbox` for a tap, none for an added actor, and the ends of the replaced actor for a
    replacement. It returns an object with that `name` and an `async run()`. Ends that the actor leaves open are closed
    when it has ended.
    """

    def __init__(self, sections: Sequence[ActorSection], services: Services, lost: LostGroups) -> None:
        """Import every factory. Raises ProfileError that names the stanza whose factory cannot be imported.

        lost: watches the actors that groups pass through.
        """
        self._services, self._lost = services, lost
        self._sections = [(section, load_factory(section)) for section in sections]

    def actor(self, name: str, actor_class: Callable[P, Runnable], /, *args: P.args, **kwargs: P.kwargs) -> Child:
        """Place an actor of the flow: the run lasts until it returns, and fails with it."""
        return self._replacement(name, actor_class, kwargs, Restart.TRANSIENT) or transient(
            actor_class(*args, **kwargs)
        )

    def observer(self, name: str, actor_class: Callable[P, Runnable], /, *args: P.args, **kwargs: P.kwargs) -> Child:
        """Place an actor whose failure does not end the run; it may read its inbox to the end."""
        return self._replacement(name, actor_class, kwargs, Restart.TEMPORARY) or temporary(
            actor_class(*args, **kwargs), ends_with_input=True
        )

    def channel(self, name: str, capacity: int) -> Channel[Any]:
        """A channel with the stages and taps of the profile, in the profile's order."""
        channel = Channel[Any](name, capacity=capacity)
        for section, factory in self._at("insert", name):
            channel.insert(partial(self._stage, section, factory))
        if taps := [partial(self._tap, section, factory) for section, factory in self._at("tap", name)]:
            channel.tap(taps)
        return channel

    def added(self) -> list[Child]:
        """The actors that are connected to no queue."""
        return [self._child(section, factory, {}, Restart.TEMPORARY) for section, factory in self._at("add", "")]

    def _replacement(
        self, name: str, actor_class: Callable[..., Runnable], arguments: Mapping[str, Any], restart: Restart
    ) -> Child | None:
        ends = {key: value for key, value in arguments.items() if _is_end(value)}
        replaced = ReplacedActor(actor_class=actor_class, arguments=arguments)
        for section, factory in self._at("replace", name):
            return self._child(section, factory, ends, restart, replaced)
        return None

    def _stage(self, section: ActorSection, factory: Factory, inbox: Inbox[Any], outbox: Outbox[Any]) -> Child:
        return self._child(section, factory, {"inbox": inbox, "outbox": outbox}, Restart.TRANSIENT)

    def _tap(self, section: ActorSection, factory: Factory, inbox: Inbox[Any]) -> Child:
        return self._child(section, factory, {"inbox": inbox}, Restart.TEMPORARY)

    def _at(self, mode: str, place: str) -> list[tuple[ActorSection, Factory]]:
        return [entry for entry in self._sections if (entry[0].mode, entry[0].at) == (mode, place)]

    def _child(
        self,
        section: ActorSection,
        factory: Factory,
        ends: dict[str, Any],
        default_restart: Restart,
        replaced: ReplacedActor | None = None,
    ) -> Child:
        services = structs.replace(self._services, replaced=replaced)
        restart = Restart(section.restart) if section.restart else default_restart
        passes_groups = section.mode in ("insert", "replace") and section.at in PLACES  # and must send each on
        return Child(
            actor=_construct(section, factory, {"services": services, **ends}),
            restart=restart,
            policy=PERMANENT_POLICY if restart is Restart.PERMANENT else RestartPolicy(),
            held_ends=tuple(_flat(ends.values())),
            ends_with_input=restart is Restart.TEMPORARY and "inbox" in ends,
            on_return=self._lost.watch(section, ends["inbox"], ends["outbox"]) if passes_groups else None,
        )


ACTORS = ("prompter", "generator", "scorer", "learner", "broadcaster", "checkpointer", "evaluator", "monitor")
SERVICES = ("server", "watchdog", "memory watch", "decode engine")
QUEUES = ("prompts", "rollouts", "scored", "reports")
FETCHER = "atropos_fetcher"
"""The actor that takes the place of the first three actors and the first two queues if environments send the groups."""


CHILDREN: Door[[Profile], Sequence[str]] = Door("attachment.children")
"""Returns names of children that the attachment starts, which no custom actor may have."""


def require_positions(profile: Profile) -> None:
    """Every custom actor has its own name and a valid position; ProfileError otherwise."""
    fetched = not has_own_groups(profile)
    actors, queues = ((FETCHER, *ACTORS[3:]), QUEUES[2:]) if fetched else (ACTORS, QUEUES)
    services = {*SERVICES, *(name for names in CHILDREN(profile) for name in names)}
    replaced = [actor.at for actor in profile.actors if actor.mode == "replace"]
    for what, values in (("name", [actor.name for actor in profile.actors]), ("place", replaced)):
        for value, count in Counter(values).items():
            if count > 1:
                raise ProfileError(f"actors: the {what} {value!r} is taken; every {what} must be different")
    for actor in profile.actors:
        places = {"replace": actors, "add": ("",)}.get(actor.mode, queues)
        if actor.at not in places:
            where = f"at one of {', '.join(places)}" if actor.mode != "add" else "without `at`"
            text = f"({actor.mode}) must be {where}, not {actor.at!r}{did_you_mean(actor.at, places)}"
        elif actor.name in {*services, *ACTORS, FETCHER} and (actor.mode, actor.at) != ("replace", actor.name):
            text = "is the name of a built-in actor or service"
        elif actor.is_in_group_flow and actor.restart not in (None, "transient"):
            text = f"must have the restart policy transient, because groups pass through it, not {actor.restart}"
        elif actor.mode == "replace" and actor.at == "evaluator" and isinstance(profile.eval, Off):
            text = 'replaces the evaluator, but eval = "off"'
        else:
            continue
        raise ProfileError(f"actors: {actor.name!r} {text}")


def load_factory(section: ActorSection) -> Factory:
    """Import `module:name`; modules in the working directory are found. Raises ProfileError."""
    if section.mode == "tap" and section.restart == "permanent":
        raise ProfileError(
            f"actors: {section.name!r} is a tap and ends with its queue: restart must be 'temporary' (the run "
            "continues if the tap fails) or 'transient' (the run fails if the tap fails), not 'permanent'"
        )
    module_name, _, attribute = section.factory.partition(":")
    try:
        factory: Factory = vars(import_user_module(module_name))[attribute]
    except (Exception, SystemExit) as error:
        reason = f"no {attribute!r} in it" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ProfileError(f"actors: {section.name!r}: {section.factory} cannot be imported: {reason}") from error
    if not callable(factory):
        raise ProfileError(f"actors: {section.name!r}: {section.factory} is a {type(factory).__name__}, not a class")
    return factory


def _construct(section: ActorSection, factory: Factory, arguments: dict[str, Any]) -> Runnable:
    try:
        actor = factory(name=section.name, **arguments, **section.options)
    except TypeError as error:
        names = ", ".join(("name", *arguments, *section.options))
        raise ProfileError(
            f"actors: {section.factory} cannot be called with the arguments {names} ({error}); see docs/actors.md"
        ) from error
    except Exception as error:
        raise ProfileError(f"actors: {section.factory} failed: {type(error).__name__}: {error}") from error
    if not _is_actor(actor, section.name):
        raise ProfileError(
            f"actors: {section.factory} returned a {type(actor).__name__!r}, which is not an actor: an actor has the "
            f"attribute name = {section.name!r} and an async run(); see docs/actors.md"
        )
    return actor


def _is_actor(actor: object, name: str) -> bool:
    return (
        hasattr(actor, "name")
        and actor.name == name
        and hasattr(actor, "run")
        and inspect.iscoroutinefunction(actor.run)
    )


def _is_end(value: object) -> bool:
    return isinstance(value, QueueEnd) or (
        isinstance(value, list) and bool(value) and all(isinstance(one, QueueEnd) for one in value)
    )


def _flat(ends: Iterable[Any]) -> Iterator[QueueEnd]:
    for end in ends:
        if isinstance(end, list):
            yield from end
        else:
            yield end
