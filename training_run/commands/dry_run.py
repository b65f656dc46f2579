"""The switch `--dry-run`: checks and prints what needs neither weights nor a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import anyio
from rich.console import Console

from clotho.models.machine import memory_limit
from training_run.groups.order import HeldOutSplit
from training_run.groups.prompts import inspect_dataset, read_split
from training_run.memory.estimate import estimate_memory, local_files
from training_run.memory.report import describe, describe_limit
from training_run.profile.load import changed_toml, resolved_toml
from training_run.profile.rules import has_own_groups
from training_run.profile.schema import Profile
from training_run.records.summary import print_dataset, print_estimate
from training_run.records.terminal_text import print_line
from training_run.rewards.runner import rewards_of
from training_run.start.preflight import require_importable

CHANGED = "# settings that differ from the defaults; --dry-run full prints all"


def dry_run(profiles: Sequence[Profile], console: Console, *, shown: Literal["changed", "full"]) -> int:
    """Print the settings of a run, its memory and the contents of its dataset; write nothing.

    profiles: of the stages, or the only one. shown: the settings that differ from the defaults, or all. What a start
    imports is imported, and its refusals are raised before anything of its profile is printed.
    """
    for number, profile in enumerate(profiles, start=1):
        title = f"# stage {number} of {len(profiles)}\n" if len(profiles) > 1 else ""
        _print_profile(profile, console, title=title, shown=shown)
    return 0


def _print_profile(profile: Profile, console: Console, *, title: str, shown: Literal["changed", "full"]) -> None:
    require_importable(profile)
    estimate = estimate_memory(profile.model, profile)
    split = read_split(profile)
    if has_own_groups(profile):
        anyio.run(_require_rewards, profile, split)
    say = partial(print_line, console)
    dataset, prompts = inspect_dataset(profile, local_files(profile.model.path), split=split, say=say)
    limit = memory_limit()
    settings = resolved_toml(profile, mask_secrets=True) if shown == "full" else f"{CHANGED}\n{changed_toml(profile)}"
    console.print(f"{title}{settings}", markup=False, highlight=False, soft_wrap=True)
    print_estimate(console, estimate, describe(estimate), limit.bytes, describe_limit(limit))
    print_dataset(console, dataset, prompts)


async def _require_rewards(profile: Profile, split: HeldOutSplit) -> None:
    """Load the rewards, in their worker processes too, and check that the dataset has their columns."""
    rewards = rewards_of(profile)
    try:
        await rewards.start()
        rewards.require_columns([*split.train, *split.heldout])
    finally:
        rewards.close()
