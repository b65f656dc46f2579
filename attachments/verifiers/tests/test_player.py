"""Tasks of real tasksets, played by the process that the run starts: tokens, rewards, tools, and what fails."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs
from structlog.testing import capture_logs

from attachments.verifiers.player import TasksetPlayer
from attachments.verifiers.sections import TASKSET, VerifiersSection
from attachments.verifiers.tasks import listed
from protocols.errors import DatasetError, ProfileError
from protocols.prompt import Prompt
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Sampling
from tests.extras import VERIFIERS
from tests.scripted_policy import END, TEMPLATE, Answers, ScriptedSampler, call, script
from tests.small_models import byte_tokenizer
from training_run.episodes.conversations import ChatWriter
from training_run.episodes.episodes import EnvironmentEpisodes
from training_run.episodes.messages import EpisodeLimits
from training_run.profile.data import DataSection

HERE = Path(__file__).parent
pytestmark = pytest.mark.needs_extra("verifiers")


def data(taskset: str, **settings: Any) -> DataSection:
    """Return `[data]` with a taskset of the tests."""
    python = os.environ.get(VERIFIERS, sys.executable)
    section = VerifiersSection(python=python, directory=str(HERE), **settings)
    return TASKSET.put(DataSection(train=f"verifiers:{taskset}"), section)


class Tasks:
    """The tasks of a taskset, with a scripted policy. failed: number of episodes of the last groups that did."""

    def __init__(self, section: DataSection, player: TasksetPlayer, **limits: int) -> None:
        self._player, self.failed = player, 0
        self._problems = {
            str(one.extra.get("does") or one.extra["idx"]): one for one in listed(section, section.train, seed=0)
        }
        self._limits = EpisodeLimits(max_turns=limits.get("max_turns", 16), max_tokens=limits.get("max_tokens", 2048))

    def episodes(self) -> EnvironmentEpisodes:
        """Return what makes episodes."""
        return EnvironmentEpisodes(
            self._limits,
            self._player,
            ChatWriter(byte_tokenizer(chat_template=TEMPLATE), tools=(), system=""),
            sampling=Sampling(max_tokens=200),
            context_length=4096,
            in_rounds=False,
        )

    async def groups(self, answers: Answers, *names: str) -> list[RolloutGroup | Discarded]:
        """Return groups of two episodes of these tasks."""
        prompts = [Prompt(group_id=n, problem=self._problems[one], tokens=(1,), seed=n) for n, one in enumerate(names)]
        episodes = self.episodes()
        found = [group async for group in episodes.source(ScriptedSampler(answers), 2).groups(prompts)]
        self.failed = episodes.counts.failed
        return found

    async def group(self, answers: Answers, name: str) -> RolloutGroup:
        """Return a group of two episodes that do not fail."""
        (found,) = await self.groups(answers, name)
        assert isinstance(found, RolloutGroup), found
        return found


@asynccontextmanager
async def tasks(taskset: str, *, limits: dict[str, int] | None = None, **settings: Any) -> AsyncIterator[Tasks]:
    """Play a taskset."""
    section = data(taskset, **settings)
    player = TasksetPlayer(section)
    try:
        await player.start()
        yield Tasks(section, player, **(limits or {}))
    finally:
        player.close()


def rendered(*contents: str) -> tuple[int, ...]:
    """Return the tokens of a conversation that the system message of the taskset begins."""
    roles = ("system", *("user", "assistant") * len(contents))
    return byte_tokenizer(chat_template=TEMPLATE).render_chat(
        [{"role": role, "content": text} for role, text in zip(roles, ("be short", *contents), strict=False)],
        add_generation_prompt=False,
    )


async def test_an_episode_is_the_conversation_as_the_template_renders_it_and_failures_cost_themselves() -> None:
    """Token for token. Untrained agents leave no row; what the taskset prints is in the event log."""
    with capture_logs() as events:
        async with tasks("talk_taskset") as played:
            names = ("talks", "raises", "nan", "two", "floods")
            talks, raises, nan, two, floods = await played.groups(script("a", "b", "c"), *names)
    for group in (talks, two, floods):
        assert isinstance(group, RolloutGroup)
        assert [one.reward for one in group.completions] == [3.0, 3.0]
    assert isinstance(talks, RolloutGroup)
    whole = rendered("go", "a", "talks 1: a", "b", "talks 2: b", "c")
    for one in talks.completions:
        assert (*talks.prompt.tokens, *one.tokens) == whole[:-1], "without the newline behind the end token"
        assert one.length == 6
        assert [turn.sampled for turn in one.turns] == [True, False, True, False, True]
    assert isinstance(raises, Discarded)
    assert "RuntimeError: no" in raises.detail
    assert isinstance(nan, Discarded)
    assert "finite" in nan.detail
    assert any(event["event"] == "taskset_output" for event in events)


@pytest.mark.slow  # starts the process
async def test_limits_of_the_run_stop_a_rollout_which_is_rewarded_as_it_is() -> None:
    """A message that `sampling.max_tokens` cuts ends it too."""
    async with tasks("talk_taskset", limits={"max_turns": 2}) as played:
        group = await played.group(script("a"), "talks")
        assert [one.reward for one in group.completions] == [2.0, 2.0]
        cut = await played.group(lambda prompt, _: "x" * 300, "talks")
        assert [(one.finish_reason, one.tokens[-1] == END) for one in cut.completions] == [("length", False)] * 2


@pytest.mark.slow  # starts the process, and a server of tools
async def test_the_policy_calls_the_tools_of_a_task() -> None:
    """Through the template, with what the server of tools answers. A call that fails is a result."""
    async with tasks("tools_taskset", settings={"tasks": 3}) as played:
        answers = script(call("sum_tools_add", a=2, b=4), call("fly"), "6")
        group = await played.group(answers, "2")
        first = group.completions[0]
        assert [one.reward for one in group.completions] == [1.0, 1.0]
        assert "tool: 6" in first.text
        assert "there is no tool 'fly'" in first.text
        assert [turn.tools for turn in first.turns if turn.sampled] == [("sum_tools_add",), ("fly",), ()]


@pytest.mark.slow  # starts the process several times
@pytest.mark.parametrize("does", ["hangs", "blocks", "exits"])
async def test_a_task_that_hangs_or_ends_its_process_costs_episodes_and_the_process_is_started_again(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that only waits costs itself. One that blocks its process or ends it costs what is played there."""
    monkeypatch.setattr("attachments.verifiers.player.FORGET_SECONDS", 0.5)
    async with tasks("talk_taskset", step_seconds=3.0) as played:
        (failed,) = await played.groups(script("a"), does)
        assert isinstance(failed, Discarded)
        group = await played.group(script("a"), "talks")
        assert [one.reward for one in group.completions] == [3.0, 3.0]


@pytest.mark.slow  # starts the process several times
async def test_a_process_that_is_killed_costs_its_episodes() -> None:
    """Which are counted; another process plays the next ones. No process is left at the end."""
    async with tasks("talk_taskset") as played:

        def answer(prompt: str, seed: int) -> str:
            if "talks 1" in prompt:
                for child in psutil.Process().children():
                    child.kill()
            return "a"

        (failed,) = await played.groups(answer, "talks")
        assert isinstance(failed, Discarded)
        assert "signal" in failed.detail
        assert played.failed == 2
        group = await played.group(script("a"), "talks")
        assert len(group.completions) == 2
    assert not [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow  # starts the process three times
async def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    """A taskset that is not there, an infinite one without a number of tasks, settings that it lacks."""
    with pytest.raises(DatasetError, match="nowhere"):
        listed(data("nowhere"), "verifiers:nowhere", seed=0)
    with pytest.raises(DatasetError, match="speed"):
        listed(data("tools_taskset", settings={"speed": 1}), "verifiers:tools_taskset", seed=0)
    (tmp_path / "broken_taskset.py").write_text("raise RuntimeError('it is broken')\n", encoding="utf-8")
    section = data("broken_taskset")
    broken = TASKSET.put(section, structs.replace(TASKSET.of(section), directory=str(tmp_path)))
    player = TasksetPlayer(broken)
    with pytest.raises(ProfileError, match="it is broken"):
        await player.start()
