"""The short form `train OBJECTIVE` of a command line, and `train distill`."""

from __future__ import annotations

from collections.abc import Sequence

from protocols.errors import ProfileError, did_you_mean, visible
from protocols.sampling import POLICY
from training_run.profile.keys import CHOICES, KEYS
from training_run.profile.program import announce_words
from training_run.profile.rules import PREFERENCES

DISTILL, TEACHER = "distill", "distillation.teacher"

OF_A_RUN = frozenset({"--profile", "--resume", "--fork"})
"""Flags with which settings come from somewhere else than from the command line."""


def spelled_out(argv: Sequence[str]) -> list[str]:
    """Return the flags that `train OBJECTIVE ...` stands for, and announce them; any other command line as it is.

    Objectives that learn a dataset, such as sft and dpo, need no rewards: those of the default profile are left out.
    `train distill` learns from a teacher alone, which `--teacher` names, with a weight of 1. Raises ProfileError if the
    word after `train` is no objective, or a teacher is missing.
    """
    if list(argv[:1]) != ["train"]:
        return list(argv)
    objectives = [name for name in CHOICES["learner.objective.type"] if name != "custom"]
    objectives += [DISTILL] if TEACHER in KEYS else []
    word = argv[1] if len(argv) > 1 else ""
    if word not in objectives:
        hint = did_you_mean(word, objectives) or f": {', '.join(objectives)}"
        raise ProfileError(f"train: {visible(word, 60)!r} is no objective{hint}; write train sft --dataset FILE")
    if word == DISTILL:
        words, rest = _distilled(argv[2:])
    else:
        given, rest = _flags(argv[2:]), list(argv[2:])
        of_dataset = word in ("sft", *PREFERENCES) and "--preference.pairs" not in given
        words = ["--learner.objective", word, *(NO_REWARDS if of_dataset and _is_alone(given) else ())]
    announce_words(words)
    return [*words, *rest]


NO_REWARDS = ("--rewards", "[]")


def _distilled(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words that `train distill` stands for, and the other words. Raises ProfileError without a teacher."""
    rest = [
        f"--{TEACHER}{one.removeprefix('--teacher')}" if one.partition("=")[0] == "--teacher" else one for one in argv
    ]
    given = _flags(rest)
    if f"--{TEACHER}" not in given and not given & OF_A_RUN:
        raise ProfileError("train distill: there is no teacher; write train distill --teacher MODEL_OR_URL")
    words = [] if "--learner.distillation-weight" in given else ["--learner.distillation-weight", "1"]
    own = any(one.rpartition("=")[2] == POLICY for one in rest)
    if _is_alone(given) and not own and "--distillation.beside-rewards" not in given:
        words += NO_REWARDS
    return words, rest


def _flags(argv: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}


def _is_alone(given: set[str]) -> bool:
    """Whether the rewards would be those of the default profile."""
    return not given & (OF_A_RUN | {"--rewards"})
