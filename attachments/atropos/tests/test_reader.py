"""The group reader: messages, discarded groups, duplicates and names of environments."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint
from msgspec import Raw

from attachments.atropos.reader import MAX_NAMES, EnvironmentNames, RecentGroups
from attachments.atropos.sample_log import SampleLog
from attachments.atropos.tests.environment_groups import (
    PROMPT,
    SAMPLING,
    VERSION,
    ReaderHarness,
    conversations,
    group,
    logprob,
    raw,
)
from attachments.atropos.validation import WireGroup, decode_group
from protocols.errors import GenerationError
from protocols.rollout import Discarded
from protocols.sampling import PromptLogprobs, Sampling


async def test_a_group_becomes_a_prompt_and_its_completions() -> None:
    """The prompt is the common prefix before the first sampled token; scores are rewards."""
    scored = await ReaderHarness().scored(group((40, 41), (40, 42, 43)))
    prompt, (one, other) = scored.group.prompt, scored.group.completions
    assert (prompt.group_id, prompt.tokens, prompt.source) == (11, PROMPT, "environment 3")
    assert (one.tokens, other.tokens) == ((40, 41), (40, 42, 43))
    assert one.logprobs == (logprob(40), logprob(41))
    assert (one.versions, one.sampled, one.finish_reason) == ((VERSION, VERSION), (), "stop")
    assert (prompt.problem.prompt, one.text) == ("%)A", "HI")
    assert (scored.rewards, scored.parts) == ((0.0, 1.0), {})
    assert (scored.temperatures, scored.zero_advantage, scored.teacher, scored.logprob_error) == ((), (), (), None)


async def test_tokens_of_the_environment_between_turns_are_masked() -> None:
    """They have log-probability 0 and the version of the token before."""
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


async def test_the_prompt_is_the_common_prefix_of_different_prompts() -> None:
    """The rest of each prompt is a masked part of its completion."""
    harness = ReaderHarness()
    harness.record((5, 9, 33), (40,), version=2)
    scored = await harness.scored(conversations(((5, 9, 33), (40,)), ((5, 9, 34, 35), (41,))))
    one, other = scored.group.completions
    assert scored.group.prompt.tokens == (5, 9)
    assert (one.tokens, one.sampled, one.versions) == ((33, 40), (False, True), (2, 2))
    assert (other.tokens, other.sampled, other.versions) == ((34, 35, 41), (False, False, True), (VERSION,) * 3)
    differing = conversations(((5, 9), (40,)), ((6, 9), (41,)))
    assert await harness.discarded(differing) == "tokens: the sequences do not begin with the same token"


async def test_the_first_token_is_never_trained_on() -> None:
    """It has no context; its mask is ignored."""
    fields = {"tokens": [[5, 40], [5, 41]], "masks": [[5, 40], [5, 41]], "scores": [0, 1]}
    scored = await ReaderHarness().scored(fields | {"inference_logprobs": [[-1, -2], [-1, -3]]})
    assert scored.group.prompt.tokens == (5,)
    assert [one.logprobs for one in scored.group.completions] == [(-2.0,), (-3.0,)]


async def test_a_sequence_without_trained_tokens_is_valid() -> None:
    """Its reward counts for the group; a group without trained tokens is invalid."""
    fields = group((40, 41), (42,))
    fields["masks"][1] = [-100] * 4
    one, other = (await ReaderHarness().scored(fields)).group.completions
    assert (one.length, other.length, other.sampled, other.versions) == (2, 0, (False,), (VERSION,))
    fields["masks"][0] = [-100] * 5
    assert await ReaderHarness().discarded(fields) == "masks: no token is trained on"


async def test_a_group_of_one_sequence_needs_another_source_of_advantages() -> None:
    """Advantages across the batch, or token advantages in the group."""
    assert await ReaderHarness().discarded(group((40,)), "zero_variance") == "all 1 rewards are 0"
    assert (await ReaderHarness(advantage="batch").scored(group((40,)))).rewards == (0.0,)
    assert (await ReaderHarness().scored(group((40,), advantages=[[0, 0, 0, 0.5]]))).token_advantages == ((0.5,),)


async def test_a_zero_variance_group_is_discarded_with_its_completions() -> None:
    """As a group that the run has sampled itself."""
    outcome = await ReaderHarness().outcome(group((40,), (41,), scores=[0.5, 0.5]))
    assert isinstance(outcome, Discarded)
    assert (outcome.reason, outcome.rewards, len(outcome.completions)) == ("zero_variance", (0.5, 0.5), 2)
    assert (outcome.prompt.tokens, outcome.prompt.source) == (PROMPT, "environment 3")


async def test_an_invalid_group_keeps_no_tokens() -> None:
    """Only its ID, the name of the environment and the reason."""
    outcome = await ReaderHarness().outcome(group((40,), (41,), scores=[0.5]))
    assert isinstance(outcome, Discarded)
    assert (outcome.prompt.group_id, outcome.prompt.tokens, outcome.completions) == (11, (), ())
    assert (outcome.prompt.source, outcome.detail) == ("environment 3", "scores: 1 for 2 sequences")


async def test_a_duplicate_group_is_discarded() -> None:
    """A client may repeat a request if the response was lost."""
    harness = ReaderHarness()
    await harness.scored(group((40,), (41,)))
    assert await harness.discarded(group((40,), (41,)), "duplicate") == "an equal group has been received before"
    await harness.scored(group((40,), (41,), scores=[1.0, 0.0]))


async def test_token_advantages_are_kept_for_sampled_tokens() -> None:
    """One per token of the completion; [] means none."""
    fields = conversations((PROMPT, (40,), (50,), (41,)), (PROMPT, (42,)))
    fields["advantages"] = [[9, 9, 9, 0.25, 9, -1], [9, 9, 9, 2]]
    assert (await ReaderHarness().scored(fields)).token_advantages == ((0.25, 0.0, -1.0), (2.0,))
    assert (await ReaderHarness().scored(fields | {"advantages": []})).token_advantages == ()
    assert "advantages: missing" in await ReaderHarness(advantage="environment").discarded(fields | {"advantages": []})


async def test_reference_log_probabilities_are_kept_if_the_learner_uses_them() -> None:
    """Otherwise they are validated and dropped."""
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
async def test_temperatures_of_sequences_that_are_not_recorded(fields: dict[str, Any], expected: Any) -> None:
    """`overrides` have precedence over the group; the default is the run's temperature."""
    assert (await ReaderHarness().scored(group((40,), (41,), **fields))).temperatures == expected


async def test_the_recorded_temperature_has_precedence() -> None:
    """A sequence with two temperatures is invalid."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), temperature=0.5)
    hot = group((40,), (41,), generation_params={"temperature": 2.0})
    assert (await harness.scored(hot)).temperatures == (0.5, 2.0)
    mixed = conversations((PROMPT, (40,), (50,), (42,)), (PROMPT, (41,)), generation_params={"temperature": 2.0})
    assert await harness.discarded(mixed) == "tokens[0]: sampled at different temperatures (0.5, 2)"


async def test_overrides_set_advantages_to_zero() -> None:
    """The rewards are kept."""
    scored = await ReaderHarness().scored(group((40,), (41,), overrides=[{"set_advantage_to_zero": True}, {}]))
    assert (scored.zero_advantage, scored.rewards) == ((True, False), (0.0, 1.0))
    assert (await ReaderHarness().scored(group((40,), (41,), overrides=[]))).zero_advantage == ()


async def test_the_sample_log_has_precedence() -> None:
    """For log-probabilities, versions, supports, finish reason and label; the difference is measured."""
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


async def test_tokens_of_the_environment_have_no_support() -> None:
    """Only sampled tokens have a support."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), support=(40, 41), top_k=2)
    harness.record((*PROMPT, 40, 50), (42,), support=(42, 43, 44), top_k=3)
    talk = conversations((PROMPT, (40,), (50,), (42,)), (PROMPT, (41,)))
    one = (await harness.scored(talk)).group.completions[0]
    assert [len(support) for support in one.supports] == [8, 0, 12]


async def test_a_sequence_has_the_routes_that_first_computed_its_tokens() -> None:
    """Of all tokens but the last; without those of a later turn, or behind the last turn, it has none."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), route=7)
    harness.record((*PROMPT, 40, 50), (42,), route=8)
    turns = PROMPT, (40,), (50,), (42,)
    one, other = (await harness.scored(conversations(turns, (PROMPT, (41,))))).group.completions
    assert one.routes is not None
    assert one.routes.experts == b"\7" * len(PROMPT) + b"\10" * 2
    assert other.routes is None
    later = conversations((*turns, (51,), (43,)), (*turns, (51,)))
    assert [one.routes for one in (await harness.scored(later)).group.completions] == [None, None]


async def test_a_sequence_with_incomplete_supports_is_invalid() -> None:
    """The learner uses supports for all tokens of a completion or for none."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), support=(40, 41), top_k=2)
    fields = conversations((PROMPT, (40,), (50,), (42,)), (PROMPT, (43,)))
    assert "tokens[0]: the support" in await harness.discarded(fields)


async def test_an_unrecorded_sequence_is_invalid_if_the_run_restricts_the_support() -> None:
    """The learner would evaluate it under another distribution."""
    harness = ReaderHarness(sampling=Sampling(max_tokens=8, top_k=20))
    assert "tokens[0][3:5]: not in the sample log" in await harness.discarded(group((40, 41), (42,)))


async def test_a_sequence_that_the_learner_cannot_evaluate_is_invalid() -> None:
    """The client used a repetition penalty."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), repetition_penalty=1.5)
    assert (await harness.discarded(group((40,), (41,)))).startswith("tokens[0][3:4]: repetition_penalty")


async def test_missing_log_probabilities_are_invalid_or_recomputed() -> None:
    """`atropos.missing_logprobs` decides; recorded spans are not recomputed."""
    fields = group((40, 41), (42,), inference_logprobs=None, overrides=[{"temperature": 0.5}, {}])
    assert "tokens[0][3:5] is not in the sample log" in await ReaderHarness().discarded(fields)
    harness = ReaderHarness(missing_logprobs="recompute")
    harness.record(PROMPT, (42,), version=4)
    scored = await harness.scored(fields)
    one, other = scored.group.completions
    assert harness.recomputed == [((*PROMPT, 40, 41), 0.5)]
    assert one.logprobs == pytest.approx((-3.7376696, -3.7612002))
    assert (one.versions, other.versions, other.logprobs) == ((9, 9), (4,), (logprob(42),))
    assert scored.logprob_error is None


async def test_a_failed_recomputation_discards_the_group() -> None:
    """The run continues."""

    async def broken(_: tuple[int, ...], __: float) -> PromptLogprobs:
        raise GenerationError("the model's logits are not finite")

    harness = ReaderHarness(missing_logprobs="recompute")
    harness.reader._recompute = broken
    detail = await harness.discarded(group((40,), (41,), inference_logprobs=None), "generation_error")
    assert detail == "the model's logits are not finite"


async def test_the_finish_reason_of_an_unrecorded_sequence_follows_from_its_length() -> None:
    """`length` at the limit of tokens or of the context, otherwise `stop`."""
    full = tuple(range(40, 40 + SAMPLING.max_tokens))
    scored = await ReaderHarness().scored(group(full, (41,)))
    assert [one.finish_reason for one in scored.group.completions] == ["length", "stop"]
    long = conversations((PROMPT + (7,) * 60, (40,)), (PROMPT, (41,)))
    assert (await ReaderHarness().scored(long)).group.completions[0].finish_reason == "length"


async def test_environments_keep_their_names() -> None:
    """The label of an environment is kept for its number, also for invalid groups."""
    harness = ReaderHarness()
    harness.record(PROMPT, (40,), client_label="arithmetic")
    assert (await harness.scored(group((40,), (41,)))).group.prompt.source == "arithmetic"
    for fields in (group((42,), (43,)), group((42,), scores=[]), group((44,), tokens="none")):
        outcome = await harness.outcome(fields)
        prompt = outcome.prompt
        assert prompt.source == "arithmetic"
    assert (await harness.scored(group((45,), (46,), env_id=None))).group.prompt.source == "environment"


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b'"text"', b"{", b"NaN", b"[" * 5000, b'{"tokens":' + b"[" * 50_000, b"\xff\xfe", b"\x00",
     b'{"tokens":[[1,NaN]],"masks":[],"scores":[]}', b'{"tokens":[[1,Infinity]],"masks":[],"scores":[]}',
     b'{"tokens":[[1]],"masks":[[1]],"scores":[1' + b"0" * 5000 + b"]}"],
)  # fmt: skip
async def test_json_that_is_not_a_group_is_invalid(content: bytes) -> None:
    """Also invalid JSON."""
    await ReaderHarness().discarded(Raw(content))


async def test_untrusted_text_in_a_detail_is_short_and_printable() -> None:
    """It contains no control characters."""
    fields = group((40,), (41,))
    fields["tokens"][0][3] = "\x1b[2J" + "x" * 10_000
    assert await ReaderHarness().discarded(fields) == "tokens[0][3]: Expected `int`, got `str`"


def wire(**fields: Any) -> WireGroup:
    """Return a decoded group."""
    return decode_group(raw(group((40, 41), (42,)) | fields))


async def test_a_group_that_is_being_read_delays_neither_a_stop_nor_the_exit() -> None:
    """Reading runs in a daemon thread, which is abandoned when the reader is cancelled."""
    harness, begun, gate, daemons = ReaderHarness(), threading.Event(), threading.Event(), list[bool]()

    class Stuck(SampleLog):
        def find(self, *_: Any, **__: Any) -> None:
            daemons.append(threading.current_thread().daemon)
            begun.set()
            assert gate.wait(30)
            daemons.clear()

    harness.reader._sample_log = Stuck()
    async with create_task_group() as tasks:
        tasks.start_soon(harness.outcome, group((40, 41), (42,)))
        while not begun.is_set():
            await checkpoint()
        tasks.cancel_scope.cancel()
    assert daemons == [True]
    gate.set()


def test_an_equal_group_is_recognised() -> None:
    """Only tokens, masks, scores and log-probabilities count."""
    recent = RecentGroups()
    assert not recent.add(wire())
    assert recent.add(wire(env_id=8, messages=[], overrides=[{}, {}]))


def test_a_different_group_is_not_a_duplicate() -> None:
    """Different scores, log-probabilities, or boundaries of rows."""
    recent = RecentGroups()
    assert not recent.add(wire())
    assert not recent.add(wire(scores=[1.0, 0.0]))
    assert not recent.add(wire(inference_logprobs=[[1, 1, 1, -2, -2], [1, 1, 1, -3]]))
    assert not recent.add(wire(tokens=[[5, 9, 33, 40], [41, 5, 9, 33, 42]]))


def test_a_label_names_an_environment() -> None:
    """Until it uses another label; invalid numbers give no name."""
    names = EnvironmentNames()
    assert names.name(0) == "environment 0"
    assert names.name(0, "arithmetic") == "arithmetic"
    assert names.name(0) == "arithmetic"
    assert names.name(0, "guessing") == "guessing"
    assert names.name(0) == "guessing"
    assert [names.name(number) for number in (None, -1, 10**12)] == ["environment"] * 3


def test_the_number_of_names_is_limited() -> None:
    """Existing names are kept."""
    names = EnvironmentNames()
    given = [names.name(number, f"label{number}") for number in range(3 * MAX_NAMES)]
    assert given[MAX_NAMES - 1 : MAX_NAMES + 1] == [f"label{MAX_NAMES - 1}", "other"]
    assert set(given[MAX_NAMES:]) == {"other"}
    assert names.name(5) == "label5"


async def test_the_number_of_hashes_and_names_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest hashes are removed; further names are `other`."""
    monkeypatch.setattr("attachments.atropos.reader.MAX_RECENT_GROUPS", 150)
    harness, names = ReaderHarness(advantage="batch"), set()
    for number in range(250):
        fields = conversations((PROMPT, (40 + number % 50,)), scores=[float(number)], env_id=number % 200)
        outcome = await harness.outcome(fields)
        assert not isinstance(outcome, Discarded)
        names.add(outcome.group.prompt.source)
    assert len(harness.reader._recent) == 150
    assert len(names) == MAX_NAMES + 1
    assert "other" in names
