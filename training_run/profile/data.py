"""Settings of problems and of reward functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from clotho.settings.bounds import FractionBelowOne, NonNegativeFloat, Positive, PositiveFloat, ZeroIsOff, about
from protocols.prompt import AnswerIn

RunIn = Literal["auto", "process", "thread"]

Where = Literal["local", "cluster"]


class DataSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems for training and evaluation: files, directories, datasets of the hub, Reasoning Gym or verifiers."""

    train: Annotated[str, about("Dataset: file, directory, OWNER/NAME on the hub, reasoning_gym:NAME.", min_length=1)]
    heldout: Annotated[str, about("Dataset of the held-out problems; empty: a part of data.train.")] = ""
    subset: Annotated[str, about("Configuration of a dataset on the hub; empty: its default.")] = ""
    train_split: Annotated[str, about("Split of a directory, or on the hub, for training.", min_length=1)] = "train"
    heldout_split: Annotated[str, about("Split that is held out; empty: data.heldout_fraction of data.train.")] = ""
    heldout_fraction: Annotated[FractionBelowOne, about("Fraction of data.train that is held out.")] = 0.1
    prompt_key: Annotated[str, about("Column of the prompt: text or chat messages.", min_length=1)] = "prompt"
    messages_key: Annotated[str, about("Column of chat messages, if there is no prompt.", min_length=1)] = "messages"
    answer_key: Annotated[str, about("Column of the correct answer; empty: the problems have none.")] = "answer"
    answer_pattern: Annotated[str, about("Regular expression that finds the answer in its column; empty: all.")] = ""
    type_key: Annotated[str, about("Column of the problem's type.", min_length=1)] = "type"
    default_type: Annotated[str, about("Type of problems whose record names no type.")] = "problem"
    type_weights: Annotated[
        dict[str, NonNegativeFloat], about("How often problems of a type occur in an epoch, by type; otherwise once.")
    ] = {}
    max_prompt_tokens: Annotated[ZeroIsOff, about("Longer prompts are removed and reported; 0: no limit.")] = 0
    system: Annotated[str, about("System message before every prompt; an empty text means none.")] = ""
    shuffle: Annotated[bool, about("Shuffle the problems in every epoch.")] = True


class RewardSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward function; the reward of a completion is the weighted sum of those that apply."""

    name: Annotated[str, about("Name of a built-in function, module:function, or path/file.py:function.", min_length=1)]
    weight: Annotated[float, about("Weight of the reward function's value in the sum.")] = 1.0
    types: Annotated[tuple[str, ...], about("Types of problems with this reward; an empty list means all.")] = ()
    timeout_seconds: Annotated[PositiveFloat, about("A longer call discards its group.")] = 10.0
    correct: Annotated[bool, about("An answer counts as correct in evaluation if the value is 1.")] = False
    run_in: Annotated[RunIn, about("Where it runs; auto: your own in a process, others in a thread.")] = "auto"
    where: Annotated[Where, about("Machines that compute it: that of the run, or those of the cluster.")] = "local"
    max_workers: Annotated[Positive | None, about("Largest number of worker processes; none means 8.")] = None
    memory_limit_mb: Annotated[Positive | None, about("Memory limit of a worker process in MB; none: 4096.")] = None
    answer_in: Annotated[AnswerIn | None, about("Where a built-in function finds the answer; none: tags.")] = None
    settings: Annotated[dict[str, Any], about("Settings of a built-in function that has any, such as judge.")] = {}
