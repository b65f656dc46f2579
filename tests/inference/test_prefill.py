"""Batched prefill: which prompts are prefilled together, and that batching does not change results."""

from __future__ import annotations

import random
from collections import deque

import pytest

from clotho.inference.cache_layout import CacheLayout
from clotho.inference.prefill import PrefixCache, common_prefix, select
from clotho.inference.scheduler import ActiveRequest, PrefillJob
from clotho.models.turns import UNDIVIDED, TurnBudget
from protocols.sampling import SampleRequest, Sampling
from tests.inference.engine_helpers import SAMPLED, complete_alone, make_engine, make_prompt, run, submit_request
from tests.small_models import tiny_source


def prefill_job(*, background: bool) -> PrefillJob:
    """A job of a prompt of five tokens."""
    request = SampleRequest(prompt=(1, 2, 3, 4, 5), sampling=SAMPLED, seeds=(0,), background=background)
    return PrefillJob(ActiveRequest(0, request, lambda _: None, 12, open=1), request.prompt, [])


@pytest.mark.parametrize(
    ("architecture", "lengths", "others"),
    [("gemma3_text", (20,) * 4, 0), ("falcon_h1", (20,) * 4, 0), ("qwen3", (12, 15, 19), 1)],
)
def test_prompts_with_cached_prefixes_are_prefilled_together(
    architecture: str, lengths: tuple[int, ...], others: int
) -> None:
    """Turns of many conversations join the batch in one tick. Prompts without a prefix may join.

    The batch starts at the shortest prefix: a few tokens of the others are computed again.
    """
    source = tiny_source(architecture)
    engine = make_engine(source)
    histories = [make_prompt(length, salt) for salt, length in enumerate(lengths, 1)]
    for history in histories:
        submit_request(engine, history, reuse_prefix=True)
        run(engine)
    turns = [(*history, 3 + number, 9, 4) for number, history in enumerate(histories)] + [make_prompt(18, 40)] * others
    answers = [submit_request(engine, turn, SAMPLED, (3,), reuse_prefix=True) for turn in turns]
    engine.tick()
    assert engine.running == len(turns)
    run(engine)
    for turn, answer in zip(turns, answers, strict=True):
        assert answer.completions[0].tokens == complete_alone(source, turn, SAMPLED, 3).tokens
    assert engine.stats().prefix_hits == len(histories)


def test_a_long_cached_prefix_is_not_recomputed_for_a_batch() -> None:
    """Its prompt is prefilled alone, from the end of the prefix."""
    engine = make_engine()
    long = make_prompt(60)
    submit_request(engine, long, reuse_prefix=True)
    run(engine)
    before = engine.stats().prefill_tokens
    for prompt in ((*long, 1, 2), make_prompt(62, 3)):
        submit_request(engine, prompt, Sampling(max_tokens=1), reuse_prefix=True)
    run(engine)
    assert engine.stats().prefill_tokens - before == 2 + 61


def test_a_long_prompt_takes_turns_with_others() -> None:
    """While a prompt of many chunks is computed, short prompts begin in every second step; results do not change."""
    source = tiny_source()
    engine = make_engine(source, prefill_chunk=8)
    prompts = [make_prompt(120), *(make_prompt(7, salt) for salt in (1, 2, 3))]
    long = submit_request(engine, prompts[0], Sampling(max_tokens=4))
    engine.tick()
    shorts = []
    for prompt in prompts[1:]:
        shorts.append(submit_request(engine, prompt, Sampling(max_tokens=30, ignore_eos=True)))
        before = engine.running
        for _ in range(3):
            engine.tick()
        assert engine.running == before + 1
    assert not long.events
    run(engine)
    for prompt, answer, most in zip(prompts, [long, *shorts], (4, 30, 30, 30), strict=True):
        sampling = Sampling(max_tokens=most, ignore_eos=most == 30)
        assert answer.completions[0].tokens == complete_alone(source, prompt, sampling).tokens


def test_two_long_prompts_share_the_turns() -> None:
    """The shorter of two long prompts is complete first, although it arrived last; both keep their results."""
    source = tiny_source()
    engine = make_engine(source, prefill_chunk=8)
    prompts = make_prompt(200), make_prompt(50, 1)
    answers = [submit_request(engine, prompt, Sampling(max_tokens=3)) for prompt in prompts]
    while not answers[1].completions:
        engine.tick()
    assert not answers[0].completions
    assert engine.stats().prefill_tokens < 150
    run(engine)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.completions[0].tokens == complete_alone(source, prompt, Sampling(max_tokens=3)).tokens


@pytest.mark.parametrize("architecture", ["qwen3", "lfm2"])
def test_the_longest_prefix_is_found(architecture: str) -> None:
    """The result equals a comparison with every entry."""
    layout = CacheLayout(tiny_source(architecture).model)
    cut = layout.right_padding_limit is None
    cache, chance = PrefixCache(layout, 10_000), random.Random(0)
    kept = {tuple(chance.choices((1, 2), k=chance.randint(1, 9))) for _ in range(60)}
    for tokens in kept:
        cache.store((0, 0), tokens, ())
        cache.store((0, 1), tokens[::-1], ())
    for _ in range(200):
        prompt = tuple(chance.choices((1, 2), k=chance.randint(1, 12)))
        usable = [common_prefix(entry, prompt) for entry in kept if cut or prompt[: len(entry)] == entry]
        hit = cache.find((0, 0), prompt)
        assert (hit[1] if hit else 0) == max(usable, default=0)


def at_once() -> TurnBudget:
    """A limit that nothing fits into: every block of a chunk has a turn of its own."""
    return TurnBudget(1e-12)


@pytest.mark.parametrize("architecture", ["qwen3", "lfm2"])
def test_turns_change_neither_results_nor_batches(architecture: str) -> None:
    """Two rounds of background prompts of several chunks: equal bits, and the same decode steps with the same rows."""
    found = []
    for turns in (None, UNDIVIDED, at_once()):
        engine = make_engine(tiny_source(architecture), prefill_chunk=16, turns=turns)
        answers = [
            submit_request(engine, make_prompt(length, length), SAMPLED, (1, 2), background=True, reuse_prefix=True)
            for length in (5, 33, 18)
        ]
        while not engine.running:
            engine.tick()
        answers.append(submit_request(engine, make_prompt(40, 40), SAMPLED, (3,), background=True))
        run(engine)
        completions = [(one.tokens, one.logprobs) for answer in answers for one in answer.completions]
        stats = engine.stats()
        found.append((completions, stats.decode_steps, stats.prefill_tokens, stats.timings["iteration_tokens_total"]))
    assert found[0] == found[1] == found[2]


def test_a_chunk_is_computed_in_many_turns() -> None:
    """One block per turn, in which no rollout is decoded. The engine has work until the chunk is complete."""
    source = tiny_source(num_hidden_layers=6)
    engine = make_engine(source, turns=at_once())
    submit_request(engine, make_prompt(30), SAMPLED, background=True)
    turns = 0
    while not engine.running:
        assert engine.has_work
        assert engine.stats().decode_steps == 0
        engine.tick()
        turns += 1
    assert turns >= 5


def test_a_client_does_not_wait_for_the_prefill_of_rollouts() -> None:
    """Between two turns of a chunk, the prompt of a client is prefilled, joins the batch and is decoded."""
    source = tiny_source(num_hidden_layers=6)
    engine = make_engine(source, prefill_chunk=8, turns=at_once())
    rollouts = submit_request(engine, make_prompt(40, 1), SAMPLED, (1, 2), background=True)
    engine.tick()
    urgent = [engine.is_urgent]
    client = submit_request(engine, make_prompt(6, 2), SAMPLED, (3,), stream=True)
    while not client.streamed():
        urgent.append(engine.is_urgent)
        assert engine.running <= 1
        engine.tick()
    assert urgent == [False, *[True] * (len(urgent) - 1)]
    assert not engine.is_urgent
    assert engine.running == 1  # the client alone
    run(engine)
    assert client.completions[0].tokens == complete_alone(source, make_prompt(6, 2), SAMPLED, 3).tokens
    for completion, seed in zip(rollouts.completions, (1, 2), strict=True):
        assert completion.tokens == complete_alone(source, make_prompt(40, 1), SAMPLED, seed).tokens


def test_a_batch_of_rollouts_contains_no_prompt_of_a_client() -> None:
    """A client would wait for all of its prompts."""
    layout = CacheLayout(tiny_source().model)
    jobs = [prefill_job(background=background) for background in (False, False, True, True)]
    waiting = deque(jobs)
    assert select(waiting, layout, 1000) == jobs[:2]
    assert select(waiting, layout, 1000) == jobs[2:]


def test_a_weight_swap_between_two_turns_of_a_chunk_restarts_its_prompts() -> None:
    """With the KV policy `recompute`; the prompts of both kinds of batches are prefilled again."""
    source = tiny_source(num_hidden_layers=6)
    engine = make_engine(source, prefill_chunk=8, turns=at_once())
    answers = [submit_request(engine, make_prompt(40, salt), SAMPLED, (salt,), background=salt == 1) for salt in (1, 2)]
    for _ in range(3):
        engine.tick()
    source.version += 1
    engine.weights_changed("recompute")
    run(engine)
    assert [one.versions for answer in answers for one in answer.completions] == [(1,) * 12] * 2
    assert engine.stats().prefill_tokens >= 2 * 39
