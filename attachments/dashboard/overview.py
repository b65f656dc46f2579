"""What the page says about a run: progress, what it waits for, findings, where every group is, and its settings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from attachments.dashboard.charts import HIDDEN, charts
from attachments.dashboard.growing_file import read_small
from attachments.dashboard.histories import decoded, number
from attachments.dashboard.run_files import RunFiles
from clotho.settings.keys import REQUIRED
from protocols.errors import ProfileError
from training_run.directory.jsonl import encode
from training_run.directory.run_directory import FACTS, PREFLIGHT
from training_run.profile.keys import KEYS, PROFILE_KEYS, SECTIONS
from training_run.profile.load import MASK, flatten
from training_run.records.evaluation_history import EVALUATION_METRICS
from training_run.records.forecast import STEP_METRICS, WINDOW, EvaluationTime, RemainingWork, StepTime, seconds_left
from training_run.records.metrics import all_metrics

SMALL_FILE = 1 << 22
"""Larger files of one object are not read."""

STAGES = ("queued", "decoding", "scoring", "waiting")
"""Where a group in flight can be: before the engine, in the engine, in the scorer, and at the learner."""

SECRET = re.compile(r"(^|_)(api_key|token|secret|password)$", re.IGNORECASE)
"""Names of settings whose values are hidden."""

MAX_TEXT = 500
"""Characters of the text that says what the run waits for."""

OUTCOMES = {
    "trained": "An update trained on the group.",
    "zero_variance": "All rewards are equal, so that the group has no gradient.",
    "stale": "The group is older than learner.max_staleness, or was sampled before a rollback.",
    "reward_error": "A reward function failed, exceeded a limit, or returned no valid number.",
    "generation_error": "The engine could not finish the group.",
    "invalid": "The group failed validation.",
    "not_finite": "The update of the group was not finite and was skipped.",
    "duplicate": "An environment had sent the group before.",
    "surplus": "The group arrived after the last batch of the run.",
    "lost": "An environment had sent the group before a restart.",
}
"""What happened to a group, by outcome."""

DESCRIPTIONS = {
    **all_metrics(),
    **{f"evaluations/{name}": text for name, text in EVALUATION_METRICS.items()},
    **{f"outcomes/{name}": text for name, text in OUTCOMES.items()},
}
"""The description of every metric and outcome."""


class Settings(NamedTuple):
    """The resolved profile of a run with hidden secrets, and the settings that differ from their defaults, by key."""

    profile: dict[str, Any]
    changes: dict[str, Any] = {}  # noqa: RUF012, never changed


def state(files: RunFiles, *, is_live: bool) -> dict[str, Any]:
    """Return what changes while a run goes on. is_live: whether a process continues the run."""
    profile = read_settings(files.directory).profile
    latest, now = files.metrics.latest, files.timeline.latest
    seconds = max(_seconds(now.get("t")), _seconds(latest.get("time/run")))
    return {
        "live": is_live,
        "step": _integer(latest.get("step")) or 0,
        "planned_steps": _planned_steps(profile),
        "seconds": seconds,
        "seconds_left": _seconds_left(files, profile, seconds) if is_live else None,
        "waiting_for": str(now.get("waiting", ""))[:MAX_TEXT] if is_live else "",
        "policy_version": _integer(latest.get("policy_version")) or 0,
        "findings": latest.get("findings", []),
        "ended_findings": files.metrics.ended_findings(),
        "outcomes": _outcomes(files),
        "in_flight": _in_flight(now) if is_live else None,
    }


def about(files: RunFiles) -> dict[str, Any]:
    """Return what a run is: its settings, machine, and findings of the start; and what the page shows of every run."""
    settings = read_settings(files.directory)
    return {
        "profile": settings.profile or None,
        "profile_changes": settings.changes,
        "facts": _object(files.directory / FACTS),
        "preflight": _object(files.directory / PREFLIGHT),
        "descriptions": DESCRIPTIONS,
        "charts": charts(),
        "hidden_columns": HIDDEN,
    }


def _outcomes(files: RunFiles) -> dict[str, int]:
    """Return the number of ended groups by outcome. Without rollouts.jsonl, they follow from the metrics."""
    return dict(files.groups.outcomes if files.groups.end else files.metrics.outcomes)


def _seconds_left(files: RunFiles, profile: Mapping[str, Any], seconds: float) -> float | None:
    """Estimate the remaining time as the display does; None before the first step."""
    lines, steps = files.metrics, _planned_steps(profile)
    step = _integer(lines.latest.get("step"))
    if step is None or steps is None or not set(lines.names) >= set(STEP_METRICS.values()):
        return None
    values = [[_seconds(value) for value in lines.newest(key, WINDOW)] for key in STEP_METRICS.values()]
    times = [StepTime(*row) for row in zip(*values, strict=True)]
    first, earliest = None, files.evaluations.earliest
    if earliest.get("problems") and _integer(earliest.get("step")) == 0:
        duration = _seconds(earliest.get("time/evaluation"))
        first = EvaluationTime(problems=_integer(earliest["problems"]) or 0, seconds=duration)
    left = seconds_left(_plan(profile, steps), step, times, first)
    return None if left is None else max(0.0, left - max(0.0, seconds - times[-1].end))


def _planned_steps(profile: Mapping[str, Any]) -> int | None:
    """Return the number of batches of a whole run: those of its chosen stages, if it has any."""
    stages = profile.get("stages")
    tables = [one for one in stages if isinstance(one, dict)] if isinstance(stages, list) else []
    chosen = [one for one in tables if profile.get("stage", "all") in ("all", one.get("kind"))]
    return sum(_integer(one.get("steps")) or 0 for one in chosen) or _integer(profile.get("steps"))


def _plan(profile: Mapping[str, Any], steps: int) -> RemainingWork:
    """Return what the run of a resolved profile does."""
    settings = profile.get("eval")
    if not isinstance(settings, dict) or settings.get("type") == "off":
        return RemainingWork(steps=steps, evaluates=False)
    interval, between = (_integer(settings.get(key)) or 0 for key in ("interval", "problems_between"))
    return RemainingWork(steps=steps, evaluates=True, interval=interval, between=between)


def read_settings(directory: Path) -> Settings:
    """Return the resolved profile of a run; empty if it cannot be read."""
    return _settings(read_small(directory / "profile.toml", SMALL_FILE) or b"")


@lru_cache(maxsize=8)
def _settings(text: bytes) -> Settings:
    """Return the settings in the text of a profile. Keys of other versions are not among the changes."""
    try:
        profile = _masked(tomllib.loads(text.decode()))
        values = flatten(profile, "profile.toml")
        chosen = PROFILE_KEYS.chosen_types(values)
    except ProfileError:
        return Settings(profile)
    except (ValueError, RecursionError):
        return Settings({})
    changes = {}
    for path, value in values.items():
        if not _is_changed(path, value, chosen):
            continue
        if path in SECTIONS:  # an array of tables
            value = [
                {key: one for key, one in entry.items() if _is_changed(f"{path}.{key}", one, {})} for entry in value
            ]
        changes[path] = value
    return Settings(profile, changes)


def _is_changed(path: str, value: Any, chosen: Mapping[str, str]) -> bool:
    """Return whether a value is not the default of its key. chosen: the types of the unions around the key."""
    variant = KEYS[path].variant(chosen) if path in KEYS else None
    if variant is None or variant.default is REQUIRED:
        return True
    return bool(msgspec.json.decode(encode(variant.default)) != value)


def _masked(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _masked(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, name) for item in value]
    if isinstance(value, str):
        return MASK if value and SECRET.search(name) else value
    return value if isinstance(value, bool | int | float) else str(value)


def _object(path: Path) -> dict[str, Any] | None:
    data = read_small(path, SMALL_FILE)
    return None if data is None else decoded(data)


def _in_flight(now: Mapping[str, Any]) -> dict[str, int]:
    groups = now.get("groups")
    counts = groups if isinstance(groups, dict) else {}
    return {stage: value if isinstance(value := counts.get(stage), int) else 0 for stage in STAGES}


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**53 else None


def _seconds(value: object) -> float:
    return float(number(value) or 0.0) if isinstance(value, int | float) else 0.0
