"""Command lines of `eval`: what applies, what is needed, and the names of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocols.errors import ProfileError
from training_run.profile.command_profiles import evaluation_help, load_evaluation


def test_the_settings_of_a_profile_that_concern_evaluation_apply() -> None:
    """Flags win over the profile; adapters are named by NAME= or by their path."""
    arguments = load_evaluation(
        ["--profile", "local-m3", "--adapter", "a=x/y", "--adapter", "runs/b", "--samples", "4", "--seed", "7"]
    )
    assert arguments.adapters == {"a": Path("x/y"), "runs/b": Path("runs/b")}
    assert (arguments.profile.seed, arguments.flags.samples, arguments.flags.part) == (7, 4, "heldout")
    assert [reward.name for reward in arguments.profile.rewards]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--model", "m"],
        ["--profile", "local-m3", "--steps", "3"],
        ["--profile", "local-m3", "--sampling.group-size", "4"],
        ["--profile", "local-m3", "--adapter", "="],
        ["--profile", "local-m3", "--adapter", "a=x", "--adapter", "a=y"],
        ["--profile", "local-m3", "--adapter", "base=x"],
        ["--profile", "local-m3", "--base", "false"],
        ["--profile", "local-m3", "--part", "some"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_cannot_be_used_is_refused(words: list[str]) -> None:
    """Model, dataset and rewards are needed; settings of training have no effect; names of adapters differ."""
    with pytest.raises(ProfileError):
        load_evaluation(words)


def test_help_lists_the_flags() -> None:
    """Only if it is requested."""
    assert evaluation_help(["--profile", "x"]) is None
    assert "--samples" in (evaluation_help(["--help"]) or "")
