"""A run built from real parts: a tiny model on disk, a few problems, and a run directory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from tests.actors.actor_helpers import compute_thread
from tests.saved_models import save
from training_run.directory.run_directory import open_run
from training_run.profile.load import Layer, decode, flatten, merge
from training_run.profile.schema import Profile
from training_run.run import RunContext
from training_run.start.startup import build_context
from training_run.supervision.lost_groups import LostGroups


def tiny_profile(directory: Path, **sections: Any) -> Profile:
    """Return a profile of ten steps of two groups. `sections` are merged into its tables."""
    base, problems = directory / "base", directory / "train.jsonl"
    if not base.exists():
        save(base)
        lines = [json.dumps({"prompt": f"{i}?", "answer": str(i), "type": "echo"}) for i in range(20)]
        problems.write_text("\n".join(lines))
    tables: dict[str, Any] = {
        "steps": 10,
        "run_dir": str(directory / "run"),
        "model": {"path": str(base)},
        "data": {"train": str(problems)},
        "rewards": [{"name": "exact", "correct": True}],
        "policy": {"method": {"type": "lora", "rank": 2, "scale": 2.0}},
        "sampling": {"group_size": 2, "max_tokens": 4},
        "learner": {"batch_size": 2},
        "server": {"type": "off"},
        "monitor": {"display": "none"},
    }
    for name, value in sections.items():
        tables[name] = {**tables.get(name, {}), **value} if isinstance(value, dict) else value
    return decode(merge([Layer(label="profile", values=flatten(to_builtins(tables), "profile"))]))


def lost_groups() -> LostGroups:
    """Return custodians of no run."""
    return LostGroups(limit_seconds=60.0, report=lambda finding: None, end=lambda: None)


@asynccontextmanager
async def open_context(
    profile: Profile, *, resume: bool = False, resume_step: int | None = None, fork: Path | None = None
) -> AsyncIterator[RunContext]:
    """Yield the context of a run, and release its run directory at the end. fork: checkpoint of another run."""
    directory = open_run(Path(profile.run_dir), resume=resume, clean=False, resume_step=resume_step, fork=fork)
    try:
        with compute_thread() as compute:
            slow_seconds = profile.monitor.watchdog_seconds
            with ExitStack() as ending:
                yield await build_context(profile, directory, compute, ending, slow_seconds=slow_seconds)
    finally:
        directory.close()
