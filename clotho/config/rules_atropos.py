"""LossSettings between settings of environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from clotho.config.dependency import Complaint
from clotho.config.group_sizes import batch_sequences, group_size, reserved_share, unfillable
from clotho.config.schema import Profile

KEYS_OF_OPTIONS = {
    "group_size": "group_size",
    "inference_weight": "weight",
    "min_batch_allocation": "min_batch_allocation",
}
"""Flags that an environment must not be given as options: rules look at the keys that set them."""

API_SERVER = "api-server"
ROUNDING = 1e-9


def groups_come_from_somewhere(profile: Profile) -> Iterator[Complaint]:
    """Groups come from one place: a server that runs, one that is started with environments, or the stand-in."""
    atropos = profile.atropos
    if not atropos.enabled or atropos.mock:
        return
    if not atropos.url and not atropos.python:
        yield (
            "atropos.enabled",
            "atropos.enabled = true must say where groups come from: atropos.url of an API server that runs, "
            "atropos.python with [[environments]] to start both, or atropos.mock = true",
        )
    if atropos.python and not profile.environments:
        what = "environments" if atropos.url else "an API server and the environments"
        yield "atropos.python", f"atropos.python starts {what}: list at least one in [[environments]]"


def environments_ask_the_gateway(profile: Profile) -> Iterator[Complaint]:
    """Environments ask the policy over HTTP, and run by themselves."""
    if not profile.atropos.enabled:
        return
    if not profile.server.enabled:
        yield (
            "server.enabled",
            "server.enabled = false leaves environments nobody to ask: atropos.enabled = true needs it",
        )
    if not profile.asynchronous:
        yield (
            "async",
            "async = false and atropos.enabled = true exclude each other: environments run by themselves, ahead of "
            "the learner; learner.max_staleness bounds how far",
        )


def distinct_environments(profile: Profile) -> Iterator[Complaint]:
    """Environments have names of their own, also as files."""
    for name, count in Counter(environment.name.casefold() for environment in profile.environments).items():
        if count > 1:
            yield "environments", f"environments: {count} are named {name!r}; capitals make no difference"
        if name == API_SERVER:
            yield "environments", f"environments: {name!r} is the name of the server's log; choose another"


def shares_of_a_batch(profile: Profile) -> Iterator[Complaint]:
    """Shares reserved in a batch fit into it, and weights are weighed against others."""
    environments = profile.environments
    total = sum(environment.min_batch_allocation or 0.0 for environment in environments)
    if total > 1.0 + ROUNDING:
        yield "environments", f"environments: min_batch_allocation comes to {total:g} in all; it must be at most 1"
    batch, shares = batch_sequences(profile), {one.name: reserved_share(one, profile) for one in environments}
    for name, share in shares.items():
        if share is not None and int(batch * share) == 0:
            yield "environments", f"environments: the share of {name!r} is less than one group of a batch: raise it"
        if share is None and sum(other or 0.0 for other in shares.values()) >= 1.0 - ROUNDING:
            yield "environments", f"environments: min_batch_allocation of the others leaves nothing for {name!r}"
    if len(environments) == 1 and environments[0].weight != 1.0 and not profile.atropos.url:
        name = environments[0].name
        yield "environments", f"environments: weight has no effect: {name!r} is the only one"


def options_of_environments(profile: Profile) -> Iterator[Complaint]:
    """What has a key of its own is no option of an environment's script."""
    for environment in profile.environments:
        for option in environment.options:
            if key := KEYS_OF_OPTIONS.get(option.removeprefix("env.")):
                yield "environments", f"environments: {environment.name!r}: say {key} by its key, not as an option"


def fillable_batches(profile: Profile) -> Iterator[Complaint]:
    """Groups of every environment can be put together to a batch, which a server fills to the last sequence."""
    sizes = {environment.name: group_size(environment, profile) for environment in profile.environments}
    if complaint := unfillable(batch_sequences(profile), sizes):
        yield "environments", f"environments: {complaint}"


ATROPOS_RULES = (
    groups_come_from_somewhere,
    environments_ask_the_gateway,
    distinct_environments,
    shares_of_a_batch,
    options_of_environments,
    fillable_batches,
)
