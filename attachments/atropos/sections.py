"""The settings of Atropos environments in a profile, and the names of what they add to a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clotho.settings.bounds import Off, PositiveFloat, PositiveFraction, Variant, about
from clotho.settings.mounted import Setting

SERVER = "atropos server"
"""Name of the child that runs the API server."""


DIRECTORY = "atropos"
"""Directory of a run for output, settings and checkpoints of the processes of environments."""

EnvironmentName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$", title="letters, digits, - and _, at most 32")]
GroupSize = Annotated[int, Meta(ge=2, le=4096)]
Interpreter = Annotated[str, about("Python interpreter with atroposlib, which runs the [[environments]].")]
Missing = Literal["recompute", "refuse"]


class AtroposSource(Variant, frozen=True, kw_only=True):
    """Groups come through the Atropos API instead of data.train; evaluation does not change."""

    max_tokens: Annotated[int, about("Longer sequences of environments are refused.", ge=2)] = 2048
    poll_seconds: Annotated[float, about("Longest pause between two requests.", ge=0.05, le=60.0)] = 1.0
    patience_seconds: Annotated[PositiveFloat, about("Time without groups until a warning names environments.")] = 60.0


class EnvironmentSource(AtroposSource, frozen=True, kw_only=True):
    """Groups come from environments."""

    python: Interpreter = ""
    missing_logprobs: Annotated[Missing, about("Recompute missing log-probabilities, or refuse the group.")] = "refuse"


class StartedServer(EnvironmentSource, frozen=True, kw_only=True, tag="start"):
    """The run starts an Atropos API server and the [[environments]]."""

    python: Interpreter


class RunningServer(EnvironmentSource, frozen=True, kw_only=True, tag="connect"):
    """The run connects to an Atropos API server that is already running."""

    url: Annotated[str, about("Address of the API server.", pattern=r"^https?://[^\s/]+\S*$", title="http://HOST:PORT")]
    reset: Annotated[bool, about("Clear the server's state of another trainer; false resumes it.")] = True


class MockSource(AtroposSource, frozen=True, kw_only=True, tag="mock"):
    """The run itself makes groups from data.train and [[rewards]] over the HTTP API, without atroposlib."""


AtroposSection = Annotated[
    Off | StartedServer | RunningServer | MockSource, about("Source of groups: data.train or an API server.")
]


class EnvironmentSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One Atropos environment, whose process is started and supervised by the run."""

    name: Annotated[EnvironmentName, about("Name of the environment in logs and metrics.")]
    script: Annotated[str, about("Python file of the environment, run with serve.", min_length=1)]
    weight: Annotated[PositiveFloat, about("Relative share of the environment in every batch.")] = 1.0
    group_size: Annotated[GroupSize | None, about("Completions per prompt here; none: sampling.group_size.")] = None
    min_batch_allocation: Annotated[
        PositiveFraction | None, about("Minimum fraction of every batch; none: in proportion to the weight.")
    ] = None
    options: Annotated[dict[str, Any], about("Flags of the script, as --env.KEY, or --KEY if KEY has a dot.")] = {}


ATROPOS = Setting[Off | StartedServer | RunningServer | MockSource](
    path="atropos",
    kind=AtroposSection,
    default=Off(),
    attachment="atropos",
    after="server",
    paths={"atropos.python": "caller"},
)
ENVIRONMENTS = Setting[tuple[EnvironmentSection, ...]](
    path="environments",
    kind=tuple[EnvironmentSection, ...],
    default=(),
    attachment="atropos",
    after="atropos",
    paths={"environments.script": "input"},
)

SETTINGS = (ATROPOS, ENVIRONMENTS)
