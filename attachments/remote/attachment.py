"""Inference servers that sample the rollouts of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attachments.remote.sections import (
    ACCEPT_WEIGHTS,
    DIRECTORY,
    GENERATOR,
    REMOTE_METRICS,
    WEIGHTS_ROOT,
    RemoteGeneration,
    RestartedServers,
)
from protocols.errors import ProfileError
from protocols.sampling import PARAMETERS, in_use
from training_run.profile.rules import Complaint, Rule

if TYPE_CHECKING:
    from clotho.settings.server import HttpServer
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


MAY_CHANGE = ("generator",)
METRICS: Mapping[str, str] = {
    "remote_servers": "State of each remote inference server, by address; totals since the last start; null "
    "without such servers.",
}
ENTRIES: Mapping[str, Mapping[str, str]] = {"remote_servers": REMOTE_METRICS}
DIRECTORIES: Mapping[str, str] = {DIRECTORY: r"mlx-lm-[0-9]+(\.log)?"}
NO_EFFECT = (
    Rule(
        "generator.api_key",
        lambda v, _: v["generator.weights.type"] == "restart",
        "mlx_lm.server has no API key",
        "generator.weights.type",
    ),
)

CONTRADICTIONS = (
    Rule(
        "server.accept_weights server.weights_root",
        lambda v, x: bool(x),
        "belongs to the command serve: a training run serves its own weights",
    ),
)


def replaces_weights(server: HttpServer) -> bool:
    """Whether another process sends weights. Raises ProfileError for a directory of weights without that."""
    accepts = ACCEPT_WEIGHTS.of(server)
    if WEIGHTS_ROOT.of(server) and not accepts:
        raise ProfileError("--server.weights-root has no effect without --server.accept-weights true")
    return accepts


def complaints(profile: Profile) -> Iterable[Complaint]:
    """Servers return no routes. Those of `generator.weights = "restart"` know the model's distribution only."""
    generator = GENERATOR.of(profile)
    if not isinstance(generator, RemoteGeneration):
        return
    if profile.learner.router_replay == "on":
        reason = 'generator = "remote" samples on servers that return no routes of experts'
        yield Complaint("learner.router_replay", f'learner.router_replay must be "auto" or "off": {reason}')
    if not isinstance(generator.weights, RestartedServers):
        return
    for name in (*in_use(profile.sampling, affects="distribution"), *in_use(profile.sampling, affects="length")):
        if name not in ("max_tokens", "logit_bias"):
            reason = 'generator.weights = "restart" samples with mlx_lm.server, which has no log-probabilities for it'
            yield Complaint(f"sampling.{name}", f"sampling.{name} must be {PARAMETERS[name].neutral}: {reason}")


def slots(profile: Profile) -> Mapping[str, str]:
    """The sampler."""
    return {"sampler": 'generator = "remote"'} if isinstance(GENERATOR.of(profile), RemoteGeneration) else {}


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Return the state of the servers."""
    if not line.get("remote_servers"):
        return ()
    from attachments.remote.place import shown

    return shown(line["remote_servers"])


async def prepare(plan: Plan) -> Attach | None:
    """Let updates return the values of their tokens, which are compared with those of the servers."""
    settings = GENERATOR.of(plan.profile)
    if not isinstance(settings, RemoteGeneration):
        return None
    plan.token_values = True

    async def attach(run: RunContext) -> None:
        from attachments.remote.sampling import add_sampler, inference_servers

        add_sampler(
            run,
            sync_interval=settings.sync_interval,
            patience_seconds=settings.patience_seconds,
            servers=inference_servers(run, settings),
        )

    return attach
