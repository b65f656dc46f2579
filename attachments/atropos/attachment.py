"""Groups from environments: an Atropos API server, which the run starts or connects to, or its mock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attachments.atropos.sections import (
    ATROPOS,
    DIRECTORY,
    ENVIRONMENTS,
    SERVER,
    AtroposSource,
    RunningServer,
    StartedServer,
)
from training_run.profile.rules import Rule
from training_run.supervision.supervisor import permanent

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


DIRECTORIES: Mapping[str, str] = {DIRECTORY: r"[A-Za-z0-9_-]+\.(log|log\.1|json)|env_checkpoints"}

MAY_CHANGE = (
    "atropos.missing_logprobs",
    "atropos.patience_seconds",
    "atropos.poll_seconds",
    "atropos.python",
    "atropos.reset",
    "atropos.url",
)
NO_EFFECT = (
    Rule(
        "environments",
        lambda v, _: not v.get("atropos.python"),
        "no atropos.python is set, which runs them",
        "atropos.type atropos.python",
    ),
)
CONTRADICTIONS = (
    Rule(
        "atropos.python",
        lambda v, x: not x and v["atropos.type"] == "start",
        "must name an interpreter, not '{}'",
    ),
    Rule(
        "atropos.python",
        lambda v, x: bool(x) and not v["environments"],
        "starts environments: list at least one in [[environments]]",
    ),
)


def may_differ(key: str, old: Profile, new: Profile) -> bool:
    """Who starts the Atropos API server does not change the groups."""
    servers = all(isinstance(ATROPOS.of(profile), StartedServer | RunningServer) for profile in (old, new))
    return key == "atropos.type" and servers


def slots(profile: Profile) -> Mapping[str, str]:
    """Environments choose their problems, and sample their groups on the HTTP server of the run."""
    source = ATROPOS.of(profile)
    if not isinstance(source, AtroposSource):
        return {}
    setting = f'atropos = "{source.__struct_config__.tag}"'
    return dict.fromkeys(("groups", "sampler", "episodes", "chooser"), setting)


def children(profile: Profile) -> Sequence[str]:
    """The API server and the environments."""
    return [SERVER, *(f"environment {environment.name}" for environment in ENVIRONMENTS.of(profile))]


def check(profile: Profile) -> None:
    """Raise ProfileError unless environments can fill a batch, and interpreter, scripts and address exist."""
    source = ATROPOS.of(profile)
    if not isinstance(source, AtroposSource) and not ENVIRONMENTS.of(profile):
        return
    from attachments.atropos.commands import require_environments

    require_environments(profile)
    if isinstance(source, RunningServer):
        from attachments.atropos.client import require_address  # imports an HTTP client

        require_address(source.url)


def memory(need: MemoryNeed) -> None:
    """Environments send whole sequences."""
    if need.profile is not None and isinstance(source := ATROPOS.of(need.profile), AtroposSource):
        need.sequence_tokens = source.max_tokens


async def prepare(plan: Plan) -> Attach | None:
    """Have environments send the groups of the run, which sample on its HTTP server."""
    source = ATROPOS.of(plan.profile)
    if not isinstance(source, AtroposSource):
        return None

    async def attach(run: RunContext) -> None:
        """Start the server and the environments that the run starts itself, and let the fetcher read from them."""
        from attachments.atropos.batch_source import group_supply, running_url, sample_log
        from attachments.atropos.processes import AtroposServer, Environment

        profile, attached, logs = run.profile, run.attached, run.directory.path / DIRECTORY
        server = AtroposServer(source.python, directory=logs) if isinstance(source, StartedServer) else None
        server_url = server.url if server else running_url(profile)
        attached.samples = samples = sample_log(profile)
        attached.groups = group_supply(run, source, samples, server_url=server_url)
        if server is not None:
            attached.services.append(permanent(server))
        for section in ENVIRONMENTS.of(profile):
            environment = Environment(
                section,
                profile,
                server_url=server_url,
                server_starts=lambda: server.starts if server else 0,
                policy_url=run.address,
                directory=logs,
            )
            attached.senders.append(permanent(environment))

    return attach
