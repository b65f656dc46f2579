"""Prompts are rendered at the start as far as they are needed then, and the others when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import DatasetError, ModelError, RequestError
from protocols.prompt import Problem
from tests.fakes import CharacterTokenizer
from training_run.groups import rendering
from training_run.groups.rendering import Renderer
from training_run.profile.data import DataSection


class CountingTokenizer(CharacterTokenizer):
    """Counts the conversations that it renders together, and one by one."""

    def __init__(self) -> None:
        self.together: list[str] = []
        self.alone = 0

    def render_chats(self, chats: Sequence[Any], /) -> list[tuple[int, ...]]:
        """Render each; the content `refused` is refused."""
        contents = [chat.messages[-1]["content"] for chat in chats]
        if "refused" in contents:
            raise RequestError("the template raises", param="messages")
        self.together += contents
        rendered = super().render_chats(chats)
        self.alone -= len(chats)
        return rendered

    def render_chat(self, messages: object, /, **options: object) -> tuple[int, ...]:
        """Count and render."""
        self.alone += 1
        return super().render_chat(messages, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dataset of more than eight problems be large."""
    monkeypatch.setattr(rendering, "CHECKED", 8)
    monkeypatch.setattr(rendering, "BATCH", 4)
    monkeypatch.setattr(rendering, "CACHED", 5)


def problems(count: int, **fields: object) -> list[Problem]:
    """Return problems with different prompts of eleven characters."""
    return [Problem(prompt=f"problem {i:03d}", answer="", type="t", **fields) for i in range(count)]  # type: ignore[arg-type]


def renderer_of(tokenizer: CharacterTokenizer, lines: list[str] | None = None, limit: int = 0) -> Renderer:
    """Return a renderer whose progress is appended to `lines`."""
    said = lines if lines is not None else []
    return Renderer(DataSection(train="", max_prompt_tokens=limit), cast(ChatTokenizer, tokenizer), said.append)


def test_the_prompts_of_a_small_dataset_are_rendered_together() -> None:
    """And once."""
    tokenizer = CountingTokenizer()
    found = renderer_of(tokenizer).render_for_training(problems(8), longest=1000)
    assert [tokenizer.decode(tokens)[6:17] for tokens in found.prompts] == [one.prompt for one in found.problems]
    assert found.lengths == list(map(len, found.prompts))
    assert (len(tokenizer.together), tokenizer.alone) == (8, 0)


def test_the_prompts_of_a_large_dataset_are_rendered_when_they_are_read() -> None:
    """The same prompts. A sample is rendered before, and a bounded number of prompts is kept."""
    tokenizer = CountingTokenizer()
    found = renderer_of(tokenizer).render_for_training(problems(100), longest=1000)
    assert 8 <= len(tokenizer.together) == len(found.lengths) <= 9
    whole = renderer_of(CharacterTokenizer()).render(problems(100))
    assert list(found.prompts) == list(whole.prompts)
    assert found.prompts[-3:] == whole.prompts[97:]
    assert tokenizer.alone == 100
    with pytest.raises(IndexError):
        found.prompts[100]


def test_prompts_that_may_be_too_long_are_measured_at_the_start() -> None:
    """Wherever they are in a large dataset, and however few."""
    long = Problem(prompt="x" * 700, answer="", type="t")
    given = [*problems(61), long, *problems(62)]
    assert long not in given[:: -(-len(given) // 8)]
    found = renderer_of(CharacterTokenizer()).render_for_training(given, longest=2000)
    assert max(found.lengths) == 700 + len("user: \nassistant: ")
    assert len(found.lengths) < 12


def test_a_problem_of_each_kind_is_rendered_at_the_start() -> None:
    """A template that refuses a conversation or a tool does so before the first update."""
    turns = ({"role": "user", "content": "a"}, {"role": "user", "content": "refused"})
    for odd in (
        Problem(prompt="refused", answer="", type="t", messages=turns),
        Problem(prompt="refused", answer="", type="t", tools=({"type": "function"},)),
    ):
        with pytest.raises(ModelError, match="cannot render"):
            renderer_of(CountingTokenizer()).render_for_training([*problems(61), odd, *problems(62)], longest=1000)


def test_a_limit_on_prompts_measures_all_of_them() -> None:
    """Together. Those that remain are rendered again when they are read, unless they were to be kept."""
    given = [Problem(prompt="x" * (100 if i % 2 else 10), answer=str(i), type="t") for i in range(40)]
    tokenizer = CountingTokenizer()
    found = renderer_of(tokenizer, limit=60).render_for_training(given, longest=1000)
    assert (len(tokenizer.together), tokenizer.alone) == (40, 0)
    assert [one.answer for one in found.problems] == [str(i) for i in range(0, 40, 2)]
    assert set(found.lengths) == set(map(len, found.prompts)) == {10 + len("user: \nassistant: ")}
    tokenizer = CountingTokenizer()
    assert len(renderer_of(tokenizer, limit=60).render(given, first=3).prompts[:3]) == 3
    assert tokenizer.alone == 0
    with pytest.raises(DatasetError, match="max_prompt_tokens"):
        renderer_of(tokenizer, limit=1).render(given)


def test_rendering_that_takes_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing if it does not."""
    lines: list[str] = []
    renderer_of(CharacterTokenizer(), lines).render(problems(2000))
    assert lines == []
    monkeypatch.setattr(rendering, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(rendering, "BATCH", 500)
    renderer_of(CharacterTokenizer(), lines).render(problems(2000))
    assert [line.rpartition(": ")[2] for line in lines] == ["0 %", "25 %", "50 %", "75 %"]
    assert all("2,000" in line for line in lines)


def test_a_prompt_that_cannot_be_rendered_is_named() -> None:
    """If it is read later, and the start could not find it."""
    tokenizer = CountingTokenizer()
    given = [Problem(prompt="broken", answer="", type="t") if i == 50 else one for i, one in enumerate(problems(100))]
    found = renderer_of(tokenizer).render_for_training(given, longest=1000)

    def refuse(messages: object, /, **options: object) -> tuple[int, ...]:
        raise RequestError("the template raises", param="messages")

    tokenizer.render_chat = refuse  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="broken"):
        found.prompts[50]
