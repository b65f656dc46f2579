"""The reader: what an environment sends becomes what the learner takes, or is refused with field and index."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Raw

from clotho.atropos.reader import MAX_NAMES, EnvironmentNames, RecentGroups
from clotho.atropos.validation import WireGroup, decode_group
from clotho.config.schema import AtroposSection
from protocols.errors import GenerationError
from protocols.rollout import Discarded
from protocols.sampling import PromptLogprobs, Sampling
from tests.atropos.environment_groups import (
    PROMPT,
    SAMPLING,
    VERSION,
    ReaderHarness,
    conversations,
    group,
    logprob,
    raw,
)

RECOMPUTE = AtroposSection(missing_logprobs="recompute")


async def test_a_group_becomes_a_prompt_and_its_completions() -> None:
    """The longest common prefix before anything is trained is the prompt; scores are the rewards."""
    scored = await ReaderHarness().scored(group((40, 41), (40, 42, 43)))
    prompt, (one, other) = scored.group.prompt, scored.group.completions
    assert (prompt.group_id, prompt.tokens, prompt.source) == (11, PROMPT, "environment 3")
    assert (one.tokens, other.tokens) == ((40, 41), (40, 42, 43))
    assert one.logprobs == (logprob(40), logprob(41))
    assert (one.versions, one.sampled, one.finish_reason) == ((VERSION, VERSION), (), "stop")
    assert (prompt.problem.prompt, one.text) == ("%)A", "HI")
    assert (scored.rewards, scored.parts) == ((0.0, 1.0), {})
    assert (scored.temperatures, scored.zero_advantage, scored.teacher, scored.logprob_error) == ((), (), (), None)


async def test_turns_between_which_the_environment_speaks() -> None:
    """What the policy did not draw is marked, has log-probability 0, and the version of the token before."""
    harness = ReaderHarness()
    before = (*PROMPT, 40, 41, 50)
    harness.record(PROMPT, (40, 41), version=4)
    harness.record(before, (42,), version=6)
    talk = conversations((PROMPT, (40, 41), (50,), (42,), (51,)), (PROMPT, (60,)))
    one, other = (await harness.scored(talk)).group.completions
    assert one.tokens == (40, 41, 50, 42, 51)
    assert one.sampled == (True, True, False, True, False)
    assert one.logprobs == (logprob(40), logprob(41), 0.0, logprob(42), 0.0)
    assert one.versions == (4, 4, 4, 6, 6)
    assert (one.length, other.length, other.sampled) == (3, 1, ())


async def test_prompts_that_differ_share_what_they_have_in_common() -> None:
    """The rest of each is read, not sampled; before the first sampled token stands its version."""
    harness = ReaderHarness()
    harness.record((5, 9, 33), (40,), version=2)
    scored = await harness.scored(conversations(((5, 9, 33), (40,)), ((5, 9, 34, 35), (41,))))
    one, other = scored.group.completions
    assert scored.group.prompt.tokens == (5, 9)
    assert (one.tokens, one.sampled, one.versions) == ((33, 40), (False, True), (2, 2))
    assert (other.tokens, other.sampled, other.versions) == ((34, 35, 41), (False, False, True), (VERSION,) * 3)
    differing = conversations(((5, 9), (40,)), ((6, 9), (41,)))
    assert await harness.discarded(differing) == "tokens: the sequences do not begin with the same token"


async def test_the_first_token_is_never_trained() -> None:
    """Nothing predicts it; a mask that trains it counts as one that does not."""
    fields = {"tokens": [[5, 40], [5, 41]], "masks": [[5, 40], [5, 41]], "scores": [0, 1]}
    scored = await ReaderHarness().scored(fields | {"inference_logprobs": [[-1, -2], [-1, -3]]})
    assert scored.group.prompt.tokens == (5,)
    assert [one.logprobs for one in scored.group.completions] == [(-2.0,), (-3.0,)]


async def test_a_sequence_that_trains_nothing_may_stand_beside_others() -> None:
    """Its reward counts among theirs; a group in which nothing is trained is refused."""
    fields = group((40, 41), (42,))
    fields["masks"][1] = [-100] * 4
    one, other = (await ReaderHarness().scored(fields)).group.completions
    assert (one.length, other.length, other.sampled, other.versions) == (2, 0, (False,), (VERSION,))
    fields["masks"][0] = [-100] * 5
    assert await ReaderHarness().discarded(fields) == "masks: no token is trained on"


async def test_a_group_of_one_is_learnt_from_where_it_can_be() -> None:
    """Compared with itself it teaches nothing; over a batch, or by advantages of its tokens, it does."""
    assert await ReaderHarness().discarded(group((40,)), "zero_variance") == "all 1 rewards are 0"
    assert (await ReaderHarness(advantage="batch").scored(group((40,)))).rewards == (0.0,)
    assert (await ReaderHarness().scored(group((40,), advantages=[[0, 0, 0, 0.5]]))).token_advantages == ((0.5,),)


async def test_equal_rewards_are_on_record_with_everything_that_is_known() -> None:
    """The group is discarded as one that the run itself had scored would be."""
    outcome = await ReaderHarness().outcome(group((40,), (41,), scores=[0.5, 0.5]))
    assert isinstance(outcome, Discarded)
    assert (outcome.reason, outcome.rewards, len(outcome.completions)) == ("zero_variance", (0.5, 0.5), 2)
    assert (outcome.prompt.tokens, outcome.prompt.source) == (PROMPT, "environment 3")


async def test_what_is_refused_costs_nothing_to_keep() -> None:
    """Neither tokens nor completions remain, only number, name and why."""
    outcome = await ReaderHarness().outcome(group((40,), (41,), scores=[0.5]))
    assert isinstance(outcome, Discarded)
    assert (outcome.prompt.group_id, outcome.prompt.tokens, outcome.completions) == (11, (), ())
    assert (outcome.prompt.source, outcome.detail) == ("environment 3", "scores: 1 for 2 sequences")


async def test_the_same_group_is_taken_once() -> None:
    """A client that repeats a post whose answer was lost does not make the policy learn it twice."""
    harness = ReaderHarness()
    await harness.scored(group((40,), (41,)))
    assert await harness.discarded(group((40,), (41,)), "duplicate") == "an equal group has been received before"
    await harness.scored(group((40,), (41,), scores=[1.0, 0.0]))


async def test_token_advantages_are_kept_where_tokens_were_drawn() -> None:
    """One per token of the completion; [] means that there are none."""
    fields = conversations((PROMPT, (40,), (50,), (41,)), (PROMPT, (42,)))
    fields["advantages"] = [[9, 9, 9, 0.25, 9, -1], [9, 9, 9, 2]]
    assert (await ReaderHarness().scored(fields)).token_advantages == ((0.25, 0.0, -1.0), (2.0,))
    assert (await ReaderHarness().scored(fields | {"advantages": []})).token_advantages == ()
    assert "advantages: missing" in await ReaderHarness(advantage="environment").discarded(fields | {"advantages": []})


async def test_reference_logprobs_are_kept_where_the_learner_uses_them() -> None:
    """Elsewhere they are checked and dropped."""
    fields = group((40,), (41,), ref_logprobs=[[1, 1, 1, -0.5], [1, 1, 1, -0.25]])
    uses: dict[str, Any] = {"reference": "environment", "kl_beta": 0.1}
    assert (await ReaderHarness(**uses).scored(fields)).reference_logprobs == ((-0.5,), (-0.25,))
    assert (await ReaderHarness().scored(fields)).reference_logprobs == ()
    assert "ref_logprobs: missing" in await ReaderHarness(**uses).discarded(fields | {"ref_logprobs": []})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ()),
        ({"generation_params": {"temperature": 0.5, "top_p": 0.9}}, (0.5, 0.5)),
        ({"group_overrides": {"temperature": 0.5}, "generation_params": {"temperature": 2}}, (2.0, 2.0)),
        ({"generation_params": {"temperature": 2}, "overrides": [{"temperature": 3}, {}]}, (3.0, 2.0)),
        ({"generation_params": {"temperature": 1}, "overrides": [{"other": 1}, None]}, ()),
    ],
)
async def test_temperatures_of_what_the_engine_does_not_remember(fields: dict[str, Any], expected: Any) -> None:
    """A sequence's own goes before the group's; without any it is the run's."""
    assert (await ReaderHarness().scored(group((40,), (41,), **fields))).temperatures == expected


async def test_the_engine_knows_the_temperature_best() -> None:
    """What it remembers is the truth; two truths in one sequence cannot be learned from."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), temperature=0.5)
    hot = group((40,), (41,), generation_params={"temperature": 2.0})
    assert (await harness.scored(hot)).temperatures == (0.5, 2.0)
    mixed = conversations((PROMPT, (40,), (50,), (42,)), (PROMPT, (41,)), generation_params={"temperature": 2.0})
    assert await harness.discarded(mixed) == "tokens[0]: sampled at different temperatures (0.5, 2)"


async def test_overrides_mute_sequences() -> None:
    """Their rewards stay."""
    scored = await ReaderHarness().scored(group((40,), (41,), overrides=[{"set_advantage_to_zero": True}, {}]))
    assert (scored.zero_advantage, scored.rewards) == ((True, False), (0.0, 1.0))
    assert (await ReaderHarness().scored(group((40,), (41,), overrides=[]))).zero_advantage == ()


async def test_what_the_engine_remembers_is_the_truth() -> None:
    """Log-probabilities, versions, supports, how it ended and who asked; the difference to what came is measured."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40, 41), client_label="arithmetic", version=4, support=(40, 41), temperature=1.0, top_k=2)
    fields = group((40, 41), (42,))
    fields["inference_logprobs"][0][3] += 0.004
    scored = await harness.scored(fields)
    one, other = scored.group.completions
    assert (one.logprobs, one.versions, one.finish_reason) == ((logprob(40), logprob(41)), (4, 4), "length")
    assert (len(one.supports), other.supports) == (2, ())
    assert scored.group.prompt.source == "arithmetic"
    assert scored.logprob_error == pytest.approx(0.004)
    fields["inference_logprobs"][0][4] -= 0.5
    assert "inference_logprobs[0][4]: -5.625 differs from the recorded -5.125" in await harness.discarded(fields)


async def test_supports_stand_beside_tokens_that_have_none() -> None:
    """What the environment said in between could have been anything."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), support=(40, 41), top_k=2)
    harness.record((*PROMPT, 40, 50), (42,), support=(42, 43, 44), top_k=3)
    talk = conversations((PROMPT, (40,), (50,), (42,)), (PROMPT, (41,)))
    one = (await harness.scored(talk)).group.completions[0]
    assert [len(support) for support in one.supports] == [8, 0, 12]


async def test_supports_that_were_recorded_of_some_spans_only_are_refused() -> None:
    """The learner evaluates a completion over what could have been sampled, or over the whole vocabulary: not both."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), support=(40, 41), top_k=2)
    fields = conversations((PROMPT, (40,), (50,), (42,)), (PROMPT, (43,)))
    assert "tokens[0]: the support" in await harness.discarded(fields)


async def test_what_nobody_remembers_is_refused_where_the_run_cuts_what_can_be_drawn() -> None:
    """The learner would evaluate it over the whole vocabulary; so it is not only late, but wrong."""
    harness = ReaderHarness(sampling=Sampling(max_tokens=8, top_k=20))
    assert "tokens[0][3:5]: not in the sample log" in await harness.discarded(group((40, 41), (42,)))


async def test_what_the_learner_cannot_evaluate_is_refused() -> None:
    """It was sampled from a distribution that is not the run's."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), repetition_penalty=1.5)
    assert (await harness.discarded(group((40,), (41,)))).startswith("tokens[0][3:4]: repetition_penalty")


async def test_nobody_knows_the_log_probabilities() -> None:
    """Refused, or computed with the weights that serve, as the profile says; only for what nobody knows."""
    fields = group((40, 41), (42,), inference_logprobs=None, overrides=[{"temperature": 0.5}, {}])
    assert "tokens[0][3:5] is not in the sample log" in await ReaderHarness().discarded(fields)
    harness = ReaderHarness(settings=RECOMPUTE)
    harness.record(PROMPT, (42,), version=4)
    scored = await harness.scored(fields)
    one, other = scored.group.completions
    assert harness.recomputed == [((*PROMPT, 40, 41), 0.5)]
    assert one.logprobs == pytest.approx((-3.7376696, -3.7612002))
    assert (one.versions, other.versions, other.logprobs) == ((9, 9), (4,), (logprob(42),))
    assert scored.logprob_error is None


async def test_a_policy_that_cannot_compute_them_loses_the_group() -> None:
    """The run goes on."""

    async def broken(_: tuple[int, ...], __: float) -> PromptLogprobs:
        raise GenerationError("the model's logits are not finite")

    harness = ReaderHarness(settings=RECOMPUTE)
    harness.reader._recompute = broken
    detail = await harness.discarded(group((40,), (41,), inference_logprobs=None), "generation_error")
    assert detail == "the model's logits are not finite"


async def test_how_a_sequence_ended_that_the_engine_does_not_remember() -> None:
    """It was cut off if no room was left, by its own bound or the policy's context."""
    full = tuple(range(40, 40 + SAMPLING.max_tokens))
    scored = await ReaderHarness().scored(group(full, (41,)))
    assert [one.finish_reason for one in scored.group.completions] == ["length", "stop"]
    long = conversations((PROMPT + (7,) * 60, (40,)), (PROMPT, (41,)))
    assert (await ReaderHarness().scored(long)).group.completions[0].finish_reason == "length"


async def test_environments_keep_their_names() -> None:
    """The label with which one asks the engine is remembered by its number, for what is refused too."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), client_label="arithmetic")
    assert (await harness.scored(group((40,), (41,)))).group.prompt.source == "arithmetic"
    for fields in (group((42,), (43,)), group((42,), scores=[]), group((44,), tokens="none")):
        outcome = await harness.outcome(fields)
        prompt = outcome.prompt if isinstance(outcome, Discarded) else outcome.group.prompt
        assert prompt.source == "arithmetic"
    assert (await harness.scored(group((45,), (46,), env_id=None))).group.prompt.source == "environment"


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b'"text"', b"{", b"NaN", b"[" * 5000, b'{"tokens":' + b"[" * 50_000, b"\xff\xfe", b"\x00",
     b'{"tokens":[[1,NaN]],"masks":[],"scores":[]}', b'{"tokens":[[1,Infinity]],"masks":[],"scores":[]}',
     b'{"tokens":[[1]],"masks":[[1]],"scores":[1' + b"0" * 5000 + b"]}"],
)  # fmt: skip
async def test_what_is_no_group_at_all(content: bytes) -> None:
    """It is refused like any other."""
    await ReaderHarness().discarded(Raw(content))


async def test_foreign_text_is_never_repeated_at_length() -> None:
    """Nor anything in it that a terminal would act on."""
    fields = group((40,), (41,))
    fields["tokens"][0][3] = "\x1b[2J" + "x" * 10_000
    assert await ReaderHarness().discarded(fields) == "tokens[0][3]: Expected `int`, got `str`"


def wire(**fields: Any) -> WireGroup:
    """A group as it was decoded."""
    return decode_group(raw(group((40, 41), (42,)) | fields))


def test_the_same_group_is_known_again_whoever_sends_it() -> None:
    """Tokens, masks, scores and log-probabilities decide; nothing else does."""
    recent = RecentGroups()
    assert not recent.add(wire())
    assert recent.add(wire(env_id=8, messages=[], overrides=[{}, {}]))


def test_what_differs_is_another_group() -> None:
    """Rewards, log-probabilities, and where one row ends and the next begins."""
    recent = RecentGroups()
    assert not recent.add(wire())
    assert not recent.add(wire(scores=[1.0, 0.0]))
    assert not recent.add(wire(inference_logprobs=[[1, 1, 1, -2, -2], [1, 1, 1, -3]]))
    assert not recent.add(wire(tokens=[[5, 9, 33, 40], [41, 5, 9, 33, 42]]))


def test_a_label_names_an_environment_for_good() -> None:
    """Under its number, until it asks under another; a number nobody has is no name."""
    names = EnvironmentNames()
    assert names.name(0) == "environment 0"
    assert names.name(0, "arithmetic") == "arithmetic"
    assert names.name(0) == "arithmetic"
    assert names.name(0, "guessing") == "guessing"
    assert names.name(0) == "guessing"
    assert [names.name(number) for number in (None, -1, 10**12)] == ["environment"] * 3


def test_names_do_not_grow_without_end() -> None:
    """Those that were given out stay."""
    names = EnvironmentNames()
    given = [names.name(number, f"label{number}") for number in range(3 * MAX_NAMES)]
    assert given[MAX_NAMES - 1 : MAX_NAMES + 1] == [f"label{MAX_NAMES - 1}", "other"]
    assert set(given[MAX_NAMES:]) == {"other"}
    assert names.name(5) == "label5"
