"""Paths with which users name runs and their checkpoints: RUN, RUN@STEP, and the directory of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from protocols.errors import CheckpointError, RunDirectoryError, did_you_mean, visible
from training_run.directory.checkpoints import DIRECTORY_NAME, MANIFEST, checkpoint_path, checkpoint_steps

MAX_LISTED_STEPS = 20
"""Number of steps that an error message lists."""


def split_step(text: str) -> tuple[Path, int | None]:
    """Return run directory and step of `RUN@STEP`; the whole text as a path without a step."""
    run, at, step = text.rpartition("@")
    if at and run and step.isascii() and step.isdecimal() and not Path(text).expanduser().exists():
        return Path(run).expanduser(), int(step)
    return Path(text).expanduser(), None


def find_checkpoint(text: str, flag: str) -> Path:
    """Return the directory of the checkpoint that a user names; without a step, that of the newest.

    text: RUN, RUN@STEP, or the directory of a checkpoint. flag: the flag with this value, for messages. The contents of
    the checkpoint are not checked. Raises RunDirectoryError or CheckpointError.
    """
    path, step = split_step(text)
    if step is None and (path / MANIFEST).is_file():
        return path
    checkpoints = path / "checkpoints"
    if not checkpoints.is_dir():
        beside = list(path.parent.iterdir()) if path.parent.is_dir() else []
        runs = [str(entry) for entry in beside if (entry / "checkpoints").is_dir()]
        what = "has no checkpoints" if path.is_dir() else "does not exist"
        raise RunDirectoryError(
            f"{flag}: run directory {visible(str(path), 200)} {what}{did_you_mean(str(path), runs)}"
        )
    return chosen_checkpoint(checkpoints, step, flag)


def chosen_checkpoint(checkpoints: Path, step: int | None, flag: str) -> Path:
    """Return the checkpoint of a step, or the newest without a step. Raises CheckpointError if there is none."""
    steps = checkpoint_steps(checkpoints)
    if step is None and steps:
        return checkpoint_path(checkpoints, steps[0])
    if step is None or step not in steps:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        listed = ", ".join(map(str, sorted(steps)[-MAX_LISTED_STEPS:])) or "none"
        raise CheckpointError(f"{flag}: {checkpoints} has {which}; the steps of its checkpoints are: {listed}")
    return checkpoint_path(checkpoints, step)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run directory that a checkpoint is in; None for a checkpoint outside of a run."""
    checkpoint = checkpoint.absolute()
    in_run = checkpoint.parent.name == "checkpoints" and DIRECTORY_NAME.fullmatch(checkpoint.name)
    return checkpoint.parent.parent if in_run else None


def run_profile(text: str) -> Path:
    """Return the path of the resolved profile of the run that a user names as in `find_checkpoint`."""
    path, _ = split_step(text)
    return (run_of(path) or path) / "profile.toml"
