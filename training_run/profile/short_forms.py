"""The short form `train OBJECTIVE` of a command line."""

from __future__ import annotations

from collections.abc import Sequence

from protocols.errors import ProfileError, did_you_mean, visible
from training_run.profile.keys import CHOICES
from training_run.profile.rules import PREFERENCES
from training_run.profile.translation import announce_words


def spelled_out(argv: Sequence[str]) -> list[str]:
    """Return the flags that `train OBJECTIVE ...` stands for, and announce them; any other command line as it is.

    Objectives that learn a dataset, such as sft and dpo, need no rewards: those of the default profile are left out.
    Raises ProfileError if the word after `train` is no objective.
    """
    if list(argv[:1]) != ["train"]:
        return list(argv)
    objectives = [name for name in CHOICES["learner.objective.type"] if name != "custom"]
    word = argv[1] if len(argv) > 1 else ""
    if word not in objectives:
        hint = did_you_mean(word, objectives) or f": {', '.join(objectives)}"
        raise ProfileError(f"train: {visible(word, 60)!r} is no objective{hint}; write train sft --dataset FILE")
    given = {flag.partition("=")[0].replace("_", "-") for flag in argv[2:]}
    of_dataset = word in ("sft", *PREFERENCES) and "--preference.pairs" not in given
    alone = of_dataset and not given & {"--profile", "--rewards", "--resume", "--fork"}
    words = ["--learner.objective", word, *(("--rewards", "[]") if alone else ())]
    announce_words(words)
    return [*words, *argv[2:]]
