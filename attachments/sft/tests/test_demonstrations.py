"""Records as demonstrations: formats, masks of answers by the chat template, and groups."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Any

import pytest
from mlx_lm.tuner.datasets import CompletionsDataset, TextDataset

from attachments.sft.demonstrations import Demonstrator
from attachments.sft.sections import SftSection
from clotho.data.problems import ProblemColumns, _problem
from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import ProfileError, RequestError
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup
from tests.library_policy import EMBEDDED
from tests.models.real_templates import TEMPLATES
from tests.small_models import byte_tokenizer
from training_run.groups.demonstrations import DatasetGroups, Demonstration
from training_run.profile.data import DataSection

END = 256
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Drops the thoughts of earlier answers, as Qwen3's does."""

OTHERWISE = (
    "{% for m in messages %}{{ m.role }}> {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Does not write an answer behind its generation prompt."""

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>a</think>yes"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "<think>b</think>no"},
]


def problem(record: dict[str, Any], **columns: str) -> Problem:
    """Read a record, whose problems have no answer of their own."""
    return _problem(record, ProblemColumns(answer="", **columns), "record")


def demonstrator(template: str = PLAIN, *, data: DataSection | None = None, **settings: Any) -> Demonstrator:
    """Return one with a tokenizer of bytes."""
    tokenizer = byte_tokenizer(chat_template=template)
    return Demonstrator(SftSection(**settings), data or DataSection(train="unused"), tokenizer)


def learned(one: Demonstration) -> list[str]:
    """Return the texts of the parts that are learned."""
    parts = groupby(zip(one.tokens, one.learned, strict=True), key=lambda pair: pair[1])
    tokenizer = byte_tokenizer()
    return [tokenizer.decode([t for t, _ in part], skip_special_tokens=False) for yes, part in parts if yes]


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", ["<think>a</think>yes<|end|>", "<think>b</think>no<|end|>"]),
        ("last", ["<think>b</think>no<|end|>"]),
        (
            "all",
            [
                "ser: hi<|end|>\nassistant: <think>a</think>yes<|end|>\nuser: why<|end|>\n"
                "assistant: <think>b</think>no<|end|>\n"
            ],
        ),
    ],
)
def test_all_answers_the_last_one_or_everything_behind_the_first_token_is_learned(
    train_on: str, expected: list[str]
) -> None:
    """An answer with its end token; what the template writes behind it is context."""
    (one,) = demonstrator(train_on=train_on).demonstrations(problem({"messages": CHAT}))
    assert learned(one) == expected


def test_an_answer_that_the_template_rewrites_later_is_learned_behind_the_prompt_that_it_had() -> None:
    """As the policy has to write it: with its thoughts."""
    first, second = demonstrator(FORGETFUL).demonstrations(problem({"messages": CHAT}))
    assert learned(first) == ["<think>a</think>yes<|end|>"]
    assert learned(second) == ["<think>b</think>no<|end|>"]
    tokenizer = byte_tokenizer(chat_template=FORGETFUL)
    assert second.tokens[: second.learned.index(True)] == tokenizer.render_chat(CHAT[:3])


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_follows_the_prompt_of_inference(name: str) -> None:
    """With templates of common models: the tokens before an answer are those that the policy is asked with."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATES[name])
    try:
        found = demonstrator(TEMPLATES[name]).demonstrations(problem({"messages": CHAT}))
    except RequestError:
        pytest.skip("the template refuses the conversation, or does not write answers behind its generation prompt")
    prompts = {tokenizer.render_chat(CHAT[:1]), tokenizer.render_chat(CHAT[:3])}
    starts = [
        one.tokens[:at]
        for one in found
        for at in range(1, len(one.tokens))
        if one.learned[at] and not one.learned[at - 1]
    ]
    assert set(starts) == prompts


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "completion": "a"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
        {"prompt": [{"role": "user", "content": "q"}], "completion": "a"},
    ],
)
def test_formats_of_mlx_lm_and_trl_are_read(record: dict[str, Any]) -> None:
    """Prompt and completion, as text or messages, and conversations."""
    (one,) = demonstrator().demonstrations(problem(record))
    assert byte_tokenizer().decode(one.tokens, skip_special_tokens=False) == "user: q<|end|>\nassistant: a<|end|>"
    assert learned(one) == ["a<|end|>"]


def test_a_worked_answer_is_a_demonstration() -> None:
    """With `data.answer_pattern`, the column of the answer is the whole solution, as in GSM8K."""
    columns = ProblemColumns(answer="solution", answer_pattern="#### (.*)")
    worked = _problem({"prompt": "q", "solution": "1+1 #### 2"}, columns, "record")
    (one,) = demonstrator().demonstrations(worked)
    assert learned(one) == ["1+1 #### 2<|end|>"]


def test_a_system_message_and_tools_are_context() -> None:
    """They stand before the answer, as in the prompts of the run."""
    data = DataSection(train="unused", system="be brief")
    (one,) = demonstrator(data=data).demonstrations(problem({"prompt": "q", "completion": "a"}))
    assert byte_tokenizer().decode(one.tokens).startswith("system: be brief")
    assert learned(one) == ["a<|end|>"]


def test_the_text_of_a_control_token_in_an_answer_is_learned_as_text() -> None:
    """Only the template writes control tokens."""
    (one,) = demonstrator().demonstrations(problem({"prompt": "q", "completion": "say <|end|> now"}))
    assert [at for at, token in enumerate(one.tokens) if token == END and one.learned[at]] == [len(one.tokens) - 1]


def test_long_demonstrations_are_cut_and_left_out_if_nothing_is_learned() -> None:
    """`sft.max_tokens` counts the prompt."""
    record = problem({"prompt": "q", "completion": "abc"})
    (one,) = demonstrator(max_tokens=21).demonstrations(record)
    assert len(one.tokens) == 21
    assert learned(one) == ["a"]
    assert demonstrator(max_tokens=20).demonstrations(record) == []


@pytest.mark.parametrize("record", [{"prompt": "What is 2 + 3?", "completion": "<answer>5</answer>"}])
def test_tokens_and_masks_are_those_of_mlx_lm(record: dict[str, Any]) -> None:
    """Of its formats `completions` and `text`. Its masked part ends behind the template's last token, ours earlier."""
    tokenizer = ChatTokenizer.from_files(EMBEDDED)
    data: Any = DataSection(train="unused")
    own: Any = tokenizer.hugging_face
    theirs: Any = CompletionsDataset([record], own, "prompt", "completion", mask_prompt=True)
    tokens, offset = theirs.process(record)
    (one,) = Demonstrator(SftSection(train_on="all"), data, tokenizer).demonstrations(problem(record))
    assert one.tokens == tuple(tokens)
    (masked,) = Demonstrator(SftSection(), data, tokenizer).demonstrations(problem(record))
    assert masked.learned.index(True) == offset
    text: Any = TextDataset([{"text": "2 + 3"}], own)
    (written,) = Demonstrator(SftSection(train_on="text"), data, tokenizer).demonstrations(
        problem({"text": "2 + 3"}, prompt="text")
    )
    assert written.tokens == tuple(text.process({"text": "2 + 3"})[0])
    assert written.learned == (False, *[True] * (len(written.tokens) - 1))


def source(template: str, **settings: Any) -> DatasetGroups:
    """Return a source at policy version 3."""
    tokenizer: ChatTokenizer = byte_tokenizer(chat_template=template)
    made = Demonstrator(SftSection(**settings), DataSection(train="unused"), tokenizer)
    return DatasetGroups(made.demonstrations, tokenizer, system="", version=lambda: 3)


def group_of(source: DatasetGroups, record: dict[str, Any]) -> RolloutGroup | Discarded:
    """Return the group of a record."""

    async def first() -> RolloutGroup | Discarded:
        prompt = Prompt(group_id=0, problem=problem(record), tokens=(1,), seed=0)
        (group,) = [group async for group in source.groups([prompt])]
        return group

    return asyncio.run(first())


def test_a_group_has_the_sequences_of_a_record_behind_the_tokens_that_they_share() -> None:
    """Its completions are of the served version, their learned tokens have the advantage 1."""
    group = group_of(source(FORGETFUL), {"messages": CHAT})
    assert isinstance(group, RolloutGroup)
    assert byte_tokenizer().decode(group.prompt.tokens, skip_special_tokens=False) == "user: hi<|end|>\nassistant: "
    first, second = group.completions
    assert first.text == "<think>a</think>yes"
    assert not first.sampled
    assert set(first.advantages) == {1.0}
    assert second.sampled
    assert second.advantages == tuple(map(float, second.sampled))
    assert [turn.sampled for turn in second.turns] == [False, True]
    assert {*first.versions, *second.versions} == {3}


@pytest.mark.parametrize(
    ("template", "settings"), [(OTHERWISE, {}), (PLAIN, {"max_tokens": 5})], ids=["template", "too long"]
)
def test_a_record_that_cannot_be_learned_is_discarded(template: str, settings: dict[str, Any]) -> None:
    """It counts as invalid."""
    group = group_of(source(template, **settings), {"prompt": "q", "completion": "a"})
    assert isinstance(group, Discarded)
    assert group.reason == "invalid"


@pytest.mark.parametrize(
    ("template", "record", "said"),
    [(PLAIN, {"prompt": "q"}, "1 of 1 records"), (OTHERWISE, {"prompt": "q", "completion": "a"}, "generation prompt")],
)
def test_a_dataset_that_cannot_be_learned_is_refused(template: str, record: dict[str, Any], said: str) -> None:
    """Without answers, or with a template that does not write them behind its generation prompt."""
    with pytest.raises(ProfileError, match=said):
        demonstrator(template).require([problem(record)])
