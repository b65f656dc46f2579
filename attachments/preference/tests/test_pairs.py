"""Records as pairs: the formats of TRL, what is learned of them, and their groups."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from attachments.preference.pairs import PairReader
from attachments.preference.sections import PreferenceSection
from clotho.data.problems import ProblemColumns, _problem
from protocols.errors import ProfileError
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup
from tests.small_models import byte_tokenizer
from training_run.groups.demonstrations import DatasetGroups
from training_run.profile.data import DataSection

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OTHERWISE = PLAIN.replace("{{ m.role }}: ", "{{ m.role }}> ")
"""Does not write an answer behind its generation prompt."""

Q, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "yes"), ("assistant", "no"))
)

FORMS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "q", "chosen": "yes", "rejected": "no"},
    "messages": {"prompt": [Q], "chosen": [YES], "rejected": [NO]},
    "text and messages": {"prompt": "q", "chosen": [YES], "rejected": "no"},
    "implicit prompt": {"chosen": [Q, YES], "rejected": [Q, NO]},
    "prompt twice": {"prompt": "q", "chosen": [Q, YES], "rejected": [Q, NO]},
}


def problem(record: dict[str, Any]) -> Problem:
    """Read a record, whose problems have no answer of their own."""
    return _problem(record, ProblemColumns(answer=""), "record")


def reader(template: str = PLAIN, *, labelled: bool = False, system: str = "", **settings: Any) -> PairReader:
    """Return one with a tokenizer of bytes."""
    data, tokenizer = DataSection(train="unused", system=system), byte_tokenizer(chat_template=template)
    return PairReader(PreferenceSection(**settings), data, tokenizer, labelled=labelled)


def group_of(made: PairReader, record: dict[str, Any], template: str = PLAIN) -> RolloutGroup | Discarded:
    """Return the group of a record at policy version 3."""
    tokenizer = byte_tokenizer(chat_template=template)

    async def first() -> RolloutGroup | Discarded:
        source = DatasetGroups(made.judged, tokenizer, system="", version=lambda: 3)
        prompt = Prompt(group_id=0, problem=problem(record), tokens=(1,), seed=0)
        (group,) = [group async for group in source.groups([prompt])]
        return group

    return asyncio.run(first())


@pytest.mark.parametrize("form", FORMS)
def test_the_formats_of_trl_are_the_same_pair(form: str) -> None:
    """Text or messages, with a prompt of its own or in both conversations; the better completion is the reference."""
    group = group_of(reader(), FORMS[form])
    assert isinstance(group, RolloutGroup)
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(group.prompt.tokens, skip_special_tokens=False) == "user: q<|end|>\nassistant: "
    better, worse = group.completions
    assert (better.text, worse.text) == ("yes", "no")
    assert ({*better.advantages}, {*worse.advantages}) == ({1.0}, {-1.0})
    assert {*better.versions, *worse.versions} == {3}
    assert (better.finish_reason, worse.finish_reason) == ("stop", "stop")
    assert problem(FORMS[form]).completion == "yes"


def test_every_answer_behind_the_prompt_is_learned() -> None:
    """What a user or a tool says between them is context."""
    more = [YES, {"role": "user", "content": "why"}, NO]
    group = group_of(reader(), {"prompt": "q", "chosen": more, "rejected": [NO]})
    assert isinstance(group, RolloutGroup)
    better, _ = group.completions
    assert [turn.sampled for turn in better.turns] == [True, False, True]
    assert better.advantages == tuple(map(float, better.sampled))


@pytest.mark.parametrize(("label", "advantage"), [(True, 1.0), (False, -1.0)])
def test_a_completion_with_a_label_is_a_group_alone(label: bool, advantage: float) -> None:
    """As KTO learns it; one that is undesirable is no reference of the held-out loss."""
    record = {"prompt": "q", "completion": "yes", "label": label}
    group = group_of(reader(labelled=True), record)
    assert isinstance(group, RolloutGroup)
    (one,) = group.completions
    assert {*one.advantages} == {advantage}
    assert problem(record).completion == ("yes" if label else "")


def test_a_system_message_stands_before_a_prompt_that_the_completions_repeat() -> None:
    """It belongs to the run, not to the record."""
    (better, _) = reader(system="be brief").judged(problem(FORMS["implicit prompt"]))
    assert byte_tokenizer().decode(better.tokens).startswith("system: be brief")


@pytest.mark.parametrize(
    ("record", "settings"),
    [
        ({"prompt": "q", "chosen": "yes", "rejected": "yes"}, {}),
        ({"prompt": "q", "chosen": "yes", "rejected": "no"}, {"max_tokens": 5}),
        ({"prompt": "q", "chosen": [{"role": "user", "content": "z"}, YES], "rejected": "no"}, {}),
        ({"prompt": "q", "chosen": [YES, {"role": "user", "content": "z"}], "rejected": "no"}, {}),
    ],
    ids=["equal", "too long", "another prompt", "no answer at the end"],
)
def test_a_pair_that_cannot_be_compared_is_discarded(record: dict[str, Any], settings: dict[str, Any]) -> None:
    """It counts as invalid."""
    group = group_of(reader(**settings), record)
    assert isinstance(group, Discarded)
    assert group.reason == "invalid"


@pytest.mark.parametrize(
    ("template", "record", "said"),
    [
        (PLAIN, {"prompt": "q", "chosen": "a"}, "1 of 1 records"),
        (PLAIN, {"prompt": "q", "completion": "a", "label": True}, "preference.pairs"),
        (OTHERWISE, FORMS["text"], "generation prompt"),
    ],
)
def test_a_dataset_without_pairs_is_refused(template: str, record: dict[str, Any], said: str) -> None:
    """Labels are for kto."""
    with pytest.raises(ProfileError, match=said):
        reader(template).require([problem(record)])
