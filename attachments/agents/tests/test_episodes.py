"""Episodes of several turns: tokens, masks, limits, groups, and environments that fail."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from attachments.agents.environment import described
from attachments.agents.messages import Answer, Request
from attachments.agents.sections import PythonAgent
from attachments.agents.tests.environments_under_test import Calculator
from attachments.agents.workers import Workers
from clotho.lanes.sampling_client import Refusal
from protocols.errors import ProfileError, RequestError
from protocols.prompt import Problem
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, CompletionDone, SampleEvent, SampleRequest, Sampling
from tests.inference.engine_helpers import make_engine, run
from tests.scripted_policy import END, TEMPLATE, ScriptedSampler, call, prompts, script
from tests.small_models import byte_tokenizer
from training_run.episodes.conversations import ChatWriter
from training_run.episodes.credit import EPSILON, turn_advantages
from training_run.episodes.episodes import Counts, EnvironmentEpisodes
from training_run.episodes.messages import EpisodeEnded, EpisodeLimits
from training_run.supervision.guarded_process import MAX_LINE_CHARACTERS

HERE = "attachments.agents.tests.environments_under_test"


@asynccontextmanager
async def episodes(environment: str, *, in_rounds: bool = True, **settings: Any) -> AsyncIterator[EnvironmentEpisodes]:
    """Episodes with an environment of the tests, two in a group."""
    agent = PythonAgent(environment=f"{HERE}:{environment}", **{"max_workers": 1, **settings})
    workers = Workers(agent)
    try:
        yield EnvironmentEpisodes(
            EpisodeLimits(max_turns=agent.max_turns, max_tokens=agent.max_tokens, credit=agent.credit),
            workers,
            ChatWriter(byte_tokenizer(chat_template=TEMPLATE), tools=(await workers.described()).tools, system=""),
            sampling=Sampling(max_tokens=200),
            context_length=4096,
            in_rounds=in_rounds,
        )
    finally:
        workers.close()


async def groups(
    made: EnvironmentEpisodes, sampler: ScriptedSampler, *columns: dict[str, Any]
) -> list[RolloutGroup | Discarded]:
    """Return the groups of problems with these columns."""
    return [group async for group in made.source(sampler, 2).groups(prompts(*columns))]


async def test_a_episode_is_the_conversation_as_the_template_renders_it() -> None:
    """Token for token, with the calls that the policy has written, so that nothing was tokenized twice or otherwise."""
    async with episodes("Calculator") as made:
        calls = (call("add", a=2, b=3), call("submit", value=5))
        (group,) = await groups(made, ScriptedSampler(script(*calls)), {"target": 5})
        assert isinstance(group, RolloutGroup)
        rendered = byte_tokenizer(chat_template=TEMPLATE).render_chat(
            [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": calls[0]},
                {"role": "tool", "content": "5"},
                {"role": "assistant", "content": calls[1]},
            ],
            tools=described(Calculator),
            add_generation_prompt=False,
        )
        for episode in group.completions:
            assert (*group.prompt.tokens, *episode.tokens) == rendered[:-1], "without the newline behind the end token"
            assert episode.reward == 1.0


async def test_only_what_the_policy_sampled_is_trained_on() -> None:
    """What the environment inserts has log-probability 0 and the version of the token before it."""
    async with episodes("Talk", max_turns=2) as made:
        (group,) = await groups(made, ScriptedSampler(script("a", "b")), {"does": "says"})
        assert isinstance(group, RolloutGroup)
        (one, _) = group.completions
        inserted = byte_tokenizer().encode("\nuser: says 1: a<|end|>\nassistant: ")
        assert one.tokens == (ord("a"), END, *inserted, ord("b"), END)
        assert one.sampled == (True, True, *[False] * len(inserted), True, True)
        assert one.versions == (1, 1, *[1] * len(inserted), 2, 2)
        assert one.logprobs == (-1.0, -1.0, *[0.0] * len(inserted), -1.0, -1.0)
        assert (one.length, one.reward) == (4, 2.0)
        assert [(turn.sampled, turn.tokens, turn.characters) for turn in one.turns] == [
            (True, 2, 1),
            (False, len(inserted), len("\nuser: says 1: a\nassistant: ")),
            (True, 2, 1),
        ]


async def test_a_prompt_is_computed_once_for_its_group_and_turns_continue_it() -> None:
    """The first messages of a group are one request. Later prompts begin with the earlier ones: the prefix cache."""
    async with episodes("Talk", max_turns=2) as made:
        sampler = ScriptedSampler(lambda prompt, seed: str(seed))
        await groups(made, sampler, {"does": "x"}, {"does": "y"})
        first, second = sampler.requests
        assert [len(request.seeds) for request in first] == [4], "the prompts of both problems are equal"
        assert [len(request.seeds) for request in second] == [1] * 4
        assert all(request.prompt[: len(first[0].prompt)] == first[0].prompt for request in second)
        assert all(request.reuse_prefix for request in (*first, *second))


async def test_the_advantage_of_a_turn_follows_from_the_rewards_of_turns() -> None:
    """All tokens of a turn have it. What an environment inserted is not trained on."""
    async with episodes("Graded", max_turns=2, credit="turn") as made:
        (group,) = await groups(made, ScriptedSampler(lambda _, seed: f"{seed % 9}"), {})
        assert isinstance(group, RolloutGroup)
        one, other = group.completions
        numbers = [[float(number) for number in re.findall(r"(?:^|assistant: )(\d)", c.text)] for c in (one, other)]
        assert numbers[0] != numbers[1]
        for completion, (first, second) in zip(group.completions, turn_advantages(numbers), strict=True):
            inserted = completion.turns[1].tokens
            assert completion.advantages == (first, first, *[second] * inserted, second, second)


@pytest.mark.parametrize("environment", ["Talk", "Overrated"])
async def test_credit_per_turn_needs_at_most_one_reward_per_turn(environment: str) -> None:
    """And one at least; otherwise, the episode has failed."""
    async with episodes(environment, max_turns=2, credit="turn") as made:
        (group,) = await groups(made, ScriptedSampler(script("1")), {})
        assert isinstance(group, Discarded)
        assert "turn_rewards" in group.detail


def test_advantages_of_turns_are_those_of_process_supervision() -> None:
    """The normalized rewards of a turn and of those after it. Episodes may differ in length; equal rewards give 0."""
    advantages = turn_advantages([(1.0, 0.0), (0.0,), (1.0, 0.0, 1.0)])
    scale = 0.5 + EPSILON
    expected = [(0.0, -0.5), (-0.5,), (0.5, 0.0, 0.5)]
    assert [pytest.approx([one / scale for one in row]) for row in expected] == [list(row) for row in advantages]
    assert turn_advantages([(1.0, 1.0), (1.0,), ()]) == [(0.0, 0.0), (0.0,), ()]


async def test_an_episode_prefills_each_token_once() -> None:
    """Each of four turns prefills what follows the prompt of the turn before. The last token of a prompt is decoded."""
    engine = make_engine()
    prompts: list[tuple[int, ...]] = []

    async def complete(requests: Sequence[SampleRequest]) -> list[list[Completion] | Refusal]:
        (request,) = requests
        prompts.append(request.prompt)
        events: list[SampleEvent] = []
        engine.submit(request, events.append)
        run(engine)
        return [[event.completion for event in events if isinstance(event, CompletionDone)]]

    async with episodes("Talk", max_turns=4) as made:
        ends = Sampling(max_tokens=8, min_tokens=2, logit_bias=((END, 100.0),))
        ((episode,),) = await made.held_out([Problem(prompt="go", answer="", type="t")], ends, [(1,)], complete)
    assert [turn.sampled for turn in episode.turns] == [True, False, True, False, True, False, True]
    assert engine.stats().prefill_tokens == len(prompts[-1]) - 1


async def test_episodes_that_are_not_in_rounds_do_not_wait_for_each_other() -> None:
    """Only their first messages are sampled together."""
    async with episodes("Talk", max_turns=2, in_rounds=False) as made:
        sampler = ScriptedSampler(lambda prompt, seed: str(seed))
        await groups(made, sampler, {"does": "x"})
        assert [len(requests) for requests in sampler.requests] == [1, 1, 1]


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 3}, 3), ({"max_tokens": 80}, 2)], ids=["turns", "tokens"])
async def test_a_episode_ends_at_its_limits_and_is_rewarded(limits: dict[str, Any], turns: int) -> None:
    """The environment acts on the last message; tokens count with the prompt and those of the environment."""
    async with episodes("Talk", **limits) as made:
        (group,) = await groups(made, ScriptedSampler(script("abc")), {})
        assert isinstance(group, RolloutGroup)
        assert [one.reward for one in group.completions] == [turns, turns]
        assert all(one.sampled[-1] for one in group.completions), "nothing is inserted behind the last message"


async def test_a_prompt_that_leaves_no_room_for_a_message_costs_its_episode() -> None:
    """Nothing is sampled."""
    async with episodes("Talk", max_tokens=4) as made:
        sampler = ScriptedSampler(script("abc"))
        (group,) = await groups(made, sampler, {})
        assert isinstance(group, Discarded)
        assert sampler.requests == []


async def test_a_message_that_the_limit_on_tokens_cuts_ends_its_episode() -> None:
    """The environment does not act on it, and the episode is rewarded as it is."""
    async with episodes("Talk") as made:
        (group,) = await groups(made, ScriptedSampler(script("abc"), ends=False), {})
        assert isinstance(group, RolloutGroup)
        assert [(one.finish_reason, one.reward) for one in group.completions] == [("length", 0.0)] * 2


async def test_a_call_that_fails_is_a_result_that_the_policy_reads() -> None:
    """An unknown tool, wrong arguments, and arguments that are no JSON; each is counted."""
    async with episodes("Calculator") as made:
        wrong = (call("fly"), call("add", a=1), call("submit", value=7))
        (group,) = await groups(made, ScriptedSampler(script(*wrong)), {"target": 7})
        assert isinstance(group, RolloutGroup)
        text = group.completions[0].text
        assert "there is no tool 'fly'" in text
        assert "missing 1 required positional argument" in text
        assert group.completions[0].reward == 1.0
        assert (made.counts.tool_calls, made.counts.tool_errors, made.counts.turns) == (6, 4, 6)
        called = [turn.tools for turn in group.completions[0].turns if turn.sampled]
        assert called == [("fly",), ("add",), ("submit",)]


async def test_an_episode_is_counted_when_it_has_ended() -> None:
    """So that the turns of a step are those of its episodes: an evaluation may run beside it."""
    async with episodes("Talk", max_turns=3) as made:

        def answer(prompt: str, _: int) -> str:
            assert made.counts == Counts()
            return "a"

        await groups(made, ScriptedSampler(answer), {})
        assert made.counts.seconds > 0
        found = made.measured("agent")
        assert (found["agent/turns"], found["agent/limited"], found["agent/tool_errors"]) == (3, 1, None)
        assert made.counts == Counts(), "the next step begins"


async def test_held_out_episodes_are_not_counted() -> None:
    """The metrics of the next step are those of the episodes that it trains on. Failed ones have no tokens."""
    sampler = ScriptedSampler(script("a"))

    async def complete(requests: Sequence[SampleRequest]) -> list[list[Completion] | Refusal]:
        return [outcome async for _, outcome in sampler.groups(requests)]

    async with episodes("Talk", max_turns=2) as made:
        problems = [Problem(prompt="go", answer="", type="t", extra={"does": does}) for does in ("says", "raises")]
        found = await made.held_out(problems, Sampling(max_tokens=200), [(0,), (0,)], complete)
        assert [one.finish_reason for (one,) in found] == ["stop", "abort"]
        assert made.counts == Counts()


async def test_what_an_environment_adds_to_the_prompt_is_part_of_it() -> None:
    """Where it differs within a group, it is context of the episodes, and the prompt is what they share."""
    async with episodes("Calculator") as made:
        sampler = ScriptedSampler(script("done"))
        (group,) = await groups(made, sampler, {"greeting": "hello"})
        assert isinstance(group, RolloutGroup)
        assert byte_tokenizer().decode(group.prompt.tokens).endswith("user: go\n\nhello\nassistant: ")


async def test_a_list_of_functions_is_tools_without_a_reward() -> None:
    """The episode ends with the first message without a call."""
    async with episodes("TOOLS") as made:
        sampler = ScriptedSampler(script(call("double", value=4), "8"))
        (group,) = await groups(made, sampler, {})
        assert isinstance(group, RolloutGroup)
        assert [one.reward for one in group.completions] == [None, None]
        assert "tool: 8" in group.completions[0].text


async def test_a_function_leads_the_conversation_itself() -> None:
    """Its first question is added to the prompt."""
    async with episodes("twice") as made:
        (group,) = await groups(made, ScriptedSampler(script("abc", "de")), {})
        assert isinstance(group, RolloutGroup)
        assert [one.reward for one in group.completions] == [3.2, 3.2]
        assert byte_tokenizer().decode(group.prompt.tokens).endswith("go\n\none?\nassistant: ")


async def test_a_conversation_that_is_begun_anew_is_a_further_row_with_the_same_reward() -> None:
    """Its prompt is what the template writes of the new messages; nothing of the row before is lost."""
    async with episodes("summarizes") as made:
        (group,) = await groups(made, ScriptedSampler(script("abc", "de", "f")), {})
        assert isinstance(group, RolloutGroup)
        first, second, *_ = group.completions
        assert [one.reward for one in group.completions] == [3.0] * 4
        prompt = byte_tokenizer(chat_template=TEMPLATE).render_chat(
            [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": "I said de"},
                {"role": "user", "content": "three?"},
            ]
        )
        shared = group.prompt.tokens
        assert (*shared, *second.tokens) == (*prompt, *byte_tokenizer().encode("de"), END)
        assert second.sampled == (*[False] * (len(prompt) - len(shared)), True, True, True)
        assert [turn.sampled for turn in first.turns] == [False, True, False, True]
        assert made.counts.forked == 2


@pytest.mark.parametrize("does", ["raises", "hangs", "exits", "nan"])
async def test_an_environment_that_fails_costs_its_own_episodes(does: str) -> None:
    """The others go on, also those whose worker has ended: they are begun again and are the same."""
    async with episodes("Talk", max_turns=2, max_workers=1, step_seconds=1.0) as made:
        found = await groups(made, ScriptedSampler(script("a")), {"does": "says"}, {"does": does}, {"does": "says"})
        assert isinstance(found[1], Discarded)
        assert found[1].reason == "reward_error"  # a run ends after learner.max_failed_batches of these
        for group in (found[0], found[2]):
            assert isinstance(group, RolloutGroup)
            assert [one.reward for one in group.completions] == [2.0, 2.0]
        assert made.counts.failed == 2


async def test_a_copy_that_an_environment_forks_does_no_harm() -> None:
    """It cannot answer."""
    async with episodes("Talk", max_turns=2) as made:
        (group,) = await groups(made, ScriptedSampler(script("a")), {"does": "forks"})
        assert isinstance(group, RolloutGroup)
        assert "from the copy" not in group.completions[0].text


async def test_what_an_environment_prints_is_in_the_event_log() -> None:
    """Long lines are cut, and the environment waits until they are read."""
    with capture_logs() as events:
        async with episodes("Talk", max_turns=2) as made:
            await groups(made, ScriptedSampler(script("a")), {"does": "floods"})
    (line,) = {event["line"] for event in events if event["event"] == "environment_output"}
    assert line == "x" * MAX_LINE_CHARACTERS


async def test_an_environment_that_does_not_repeat_itself_is_not_continued_elsewhere() -> None:
    """An episode whose worker ended because of another one has failed if its beginning would be another."""
    async with episodes("Drifting", max_turns=3, max_workers=1, step_seconds=5.0) as made:
        found = await groups(made, ScriptedSampler(lambda prompt, _: "a"), {"does": ""}, {"does": "exits"})
        assert all(isinstance(group, Discarded) for group in found)


@pytest.mark.parametrize("name", ["silent", "odd"])
async def test_messages_that_cannot_be_written_cost_their_episode(name: str) -> None:
    """A second question without a message, and a message without content."""
    async with episodes(name) as made:
        (group,) = await groups(made, ScriptedSampler(script("a")), {})
        assert isinstance(group, Discarded)
        assert "message" in group.detail


async def test_a_function_that_ignores_the_end_of_its_episode_fails() -> None:
    """It would otherwise run for ever."""
    async with episodes("endless", max_turns=2) as made:
        (group,) = await groups(made, ScriptedSampler(script("a")), {})
        assert isinstance(group, Discarded)


async def test_a_request_that_the_engine_refuses_costs_one_episode() -> None:
    """As if the environment had failed."""

    class Refusing(ScriptedSampler):
        async def groups(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, Any], None]:
            for index, _ in enumerate(requests):
                yield index, RequestError("no", param="prompt")

    async with episodes("Talk") as made:
        (group,) = await groups(made, Refusing(script("a")), {})
        assert isinstance(group, Discarded)


async def test_held_out_episodes_have_the_order_of_problems_and_seeds() -> None:
    """One that failed has no tokens."""
    async with episodes("Talk", max_turns=1) as made:
        sampler = ScriptedSampler(lambda prompt, seed: str(seed))

        async def complete(requests: Sequence[SampleRequest]) -> list[list[Completion] | Refusal]:
            found = {index: outcome async for index, outcome in sampler.groups(requests)}
            return [found[index] for index in range(len(requests))]

        problems = [prompt.problem for prompt in prompts({}, {"does": "raises"})]
        found = await made.held_out(problems, Sampling(), [(7, 8), (9,)], complete)
        assert [[one.text for one in group] for group in found] == [["7", "8"], [""]]
        assert found[1][0].tokens == ()


NO_END = "{# tools <tool_call> #}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.mark.parametrize(
    ("name", "reason"), [("Undescribed", "no description"), ("Missing", "'Missing'"), ("TOOLS", "end token")]
)
async def test_what_cannot_work_is_refused_at_the_start(name: str, reason: str) -> None:
    """Tools without a description, a name that does not exist, a template that ends no answer with an end token."""
    agent = PythonAgent(environment=f"{HERE}:{name}")
    workers = Workers(agent)
    try:
        with pytest.raises(ProfileError, match=reason):
            ChatWriter(byte_tokenizer(chat_template=NO_END), tools=(await workers.described()).tools, system="")
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("name", "columns"),
    [("Calculator", ()), ("Talk", ()), ("TOOLS", ()), ("Needing", ("colour",)), ("needing", ("colour",))],
)
async def test_parameters_of_reset_without_a_default_are_columns_that_the_dataset_needs(
    name: str, columns: tuple[str, ...]
) -> None:
    """Of a class, and of a function that returns an object."""
    workers = Workers(PythonAgent(environment=f"{HERE}:{name}"))
    try:
        assert (await workers.described()).required == columns
    finally:
        workers.close()


class CountedWorker:
    """A worker whose episodes end at once."""

    def __init__(self, *_: object) -> None:
        self.episodes, self.ended = 0, False

    async def answer(self, request: Request) -> Answer:
        """Answer as an environment that gives no reward."""
        return EpisodeEnded()


async def test_an_episode_gets_a_worker_of_its_own_or_the_one_with_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further worker starts while all have episodes and there are fewer than `max_workers`."""
    monkeypatch.setattr("attachments.agents.workers.EnvironmentWorker", CountedWorker)
    workers = Workers(PythonAgent(environment="talks:Talk", max_workers=2))
    made = [workers.episode(Problem(prompt="go", answer="", type="t")) for _ in range(7)]
    for one in made[:4]:
        await one.begin()
    first, second = (made[i]._worker for i in range(2))
    assert [one._worker for one in made[2:4]] == [first, second], "each has two"
    assert first is not second
    for one in (made[1], made[3]):
        await one.close()
    for one in made[4:]:
        await one.begin()
    assert [one._worker for one in made[4:]] == [second, second, first]
