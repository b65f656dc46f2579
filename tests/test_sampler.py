"""Sampler: synchronous and asynchronous calls, publishing, scoring, and the errors of a user."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from anyio.lowlevel import checkpoint
from msgspec import structs

import clotho
from clotho.lanes.compute_thread import finish
from clotho.models.turns import TurnBudget
from clotho.sampler import OwnThreads, Sampler
from clotho.settings.engine import EngineSection
from protocols.errors import GenerationError, ProfileError, RequestError
from protocols.sampling import SampleRequest
from protocols.step import WeightsReady
from tests.actors.actor_helpers import compute_thread
from tests.library_policy import QUESTIONS, SAMPLING, data, policy


def prompts() -> list[tuple[int, ...]]:
    """Return three prompts."""
    return [policy().chat(question) for question in QUESTIONS]


def tokens(groups: list[list[clotho.Completion]]) -> list[list[tuple[int, ...]]]:
    """Return the tokens of completions; their log-probabilities depend on the batch up to rounding."""
    return [[completion.tokens for completion in group] for group in groups]


def test_completions_are_a_function_of_their_seed_and_their_place() -> None:
    """Whatever else is sampled, and however it is called."""
    with clotho.Sampler(policy()) as sampler:
        first = sampler.sample(prompts(), SAMPLING, n=2, seed=1)
        assert [len(group) for group in first] == [2, 2, 2]
        assert tokens(first) == tokens(asyncio.run(sampler.sample_async(prompts(), SAMPLING, n=2, seed=1)))
        assert tokens(first[:1]) == tokens(sampler.sample(prompts()[:1], SAMPLING, n=2, seed=1))
        assert tokens(first) != tokens(sampler.sample(prompts(), SAMPLING, n=2, seed=2))
        assert len(set(tokens(first)[1])) == 2


def test_a_completion_has_a_logprob_and_a_version_for_each_token() -> None:
    """Which score agrees with."""
    with clotho.Sampler(policy()) as sampler:
        groups = sampler.sample(prompts(), SAMPLING)
        completions = [completion for (completion,) in groups]
        assert all(set(one.versions) == {0} for one in completions)
        scores = sampler.score(prompts(), completions)
        for one, row in zip(completions, scores, strict=True):
            assert row == pytest.approx(one.logprobs, abs=1e-3)
        assert asyncio.run(sampler.score_async(prompts(), [one.tokens for one in completions])) == scores


def test_a_completion_of_a_restricted_distribution_has_its_support_for_each_token() -> None:
    """Which a learner needs to compute the same log-probabilities. Without a top-k there is none."""
    restricted = structs.replace(SAMPLING, top_k=2)
    with clotho.Sampler(policy()) as sampler:
        (one,), (other,) = sampler.sample(prompts()[:1], restricted), sampler.sample(prompts()[:1], SAMPLING)
    assert [len(support) for support in one[0].supports] == [8] * len(one[0].tokens)
    assert other[0].supports == ()


def test_nothing_is_sampled_from_no_prompts() -> None:
    """An empty batch is a batch."""
    with clotho.Sampler(policy()) as sampler:
        assert sampler.sample([]) == []
        assert sampler.score([], []) == []


def test_published_weights_sample_from_the_next_token_on() -> None:
    """Their version is that of the learner, and the tokens name it."""
    learner = clotho.Learner(policy(), sampling=SAMPLING)
    with clotho.Sampler(policy()) as sampler, clotho.Sampler(policy()) as other:
        before = sampler.sample(prompts(), SAMPLING, seed=3)
        learner.forward_backward(data())
        assert learner.optim_step(learning_rate=0.05).applied
        assert tokens(sampler.sample(prompts(), SAMPLING, seed=3)) == tokens(before)  # not published yet
        assert sampler.publish(learner) == sampler.version == learner.version == 1
        after = sampler.sample(prompts(), SAMPLING, seed=3)
        assert tokens(after) != tokens(before)
        assert {version for (one,) in after for version in one.versions} == {1}
        assert sampler.served.fingerprint == learner.fingerprint
        assert other.version == 0  # a sampler has weights of its own
        assert tokens(other.sample(prompts(), SAMPLING, seed=3)) == tokens(before)
        assert asyncio.run(sampler.publish_async(learner)) == 1


@pytest.mark.parametrize("kv_policy", ["keep", "recompute", "drain"])
def test_weights_are_published_while_completions_are_under_way(kv_policy: str) -> None:
    """A completion can have tokens of two versions, which never decrease."""
    learner = clotho.Learner(policy(), learning_rate=1e-3, sampling=SAMPLING)
    learner.forward_backward(data())
    learner.optim_step()
    long = clotho.Sampling(max_tokens=200, ignore_eos=True)

    async def both() -> tuple[int, list[list[clotho.Completion]]]:
        sampling = asyncio.create_task(sampler.sample_async(prompts(), long, n=2))
        async for event in sampler.stream(prompts()[0], long):
            if isinstance(event, clotho.TokenSampled):
                break
        return await sampler.publish_async(learner), await sampling

    with clotho.Sampler(policy(), kv_policy=kv_policy) as sampler:  # type: ignore[arg-type]
        version, groups = asyncio.run(both())
    assert version == 1
    for one in (one for group in groups for one in group):
        assert list(one.versions) == sorted(one.versions)
        assert set(one.versions) <= {0, 1}


def test_a_stream_yields_each_token_and_then_the_completion() -> None:
    """Its text is that of the tokens."""

    async def read() -> list[object]:
        return [event async for event in sampler.stream(prompts()[0], SAMPLING, seed=4)]

    with clotho.Sampler(policy()) as sampler:
        *events, last = asyncio.run(read())
    assert isinstance(last, clotho.CompletionDone)
    sampled = [one for one in events if isinstance(one, clotho.TokenSampled)]
    assert tuple(one.token for one in sampled) == last.completion.tokens
    assert "".join(one.text for one in sampled) + last.tail == last.completion.text


def test_threads_and_event_loops_share_a_sampler() -> None:
    """Their rows are decoded together."""
    with clotho.Sampler(policy()) as sampler, ThreadPoolExecutor(4) as threads:
        expected = sampler.sample(prompts(), SAMPLING, seed=5)
        found = [threads.submit(sampler.sample, prompts(), SAMPLING, seed=5) for _ in range(3)]
        found.append(threads.submit(lambda: asyncio.run(sampler.sample_async(prompts(), SAMPLING, seed=5))))
        assert [tokens(one.result()) for one in found] == [tokens(expected)] * 4


def test_a_cancelled_call_frees_its_rows() -> None:
    """The next call finds the batch empty."""

    async def cancel() -> None:
        endless = clotho.Sampling(max_tokens=400, ignore_eos=True)
        task = asyncio.create_task(sampler.sample_async(prompts(), endless, n=8))
        await checkpoint()  # the task submits its requests
        async for _ in sampler.stream(prompts()[0], SAMPLING):
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with clotho.Sampler(policy()) as sampler:
        asyncio.run(cancel())
        (alone,) = sampler.sample(prompts()[:1], SAMPLING)
        assert len(alone) == 1
        assert (sampler.engine.stats().running_rows, sampler.engine.stats().waiting_rows) == (0, 0)
        assert sampler.engine.stats().finished["abort"] >= 24


def test_a_closed_sampler_says_so() -> None:
    """What was under way fails, and later calls are refused."""
    sampler = clotho.Sampler(policy())
    endless = clotho.Sampling(max_tokens=400, ignore_eos=True)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            sampler.sample(prompts(), endless, n=8)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    async def first_token() -> None:
        async for _ in sampler.stream(prompts()[0], SAMPLING):
            break

    asyncio.run(first_token())
    sampler.close()
    sampler.close()
    thread.join()
    assert isinstance(caught[0], GenerationError | RuntimeError)
    for call in (lambda: sampler.sample(prompts()), lambda: sampler.score([], []), lambda: sampler.publish(None)):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            call()


def test_a_failed_step_fails_its_requests_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler, and the other samplers, go on."""
    with clotho.Sampler(policy()) as sampler, clotho.Sampler(policy()) as other:
        expected = sampler.sample(prompts(), SAMPLING)
        with monkeypatch.context() as patched:

            def broken() -> int:
                raise MemoryError("no memory")

            patched.setattr(sampler.engine, "tick", broken)
            with pytest.raises(GenerationError):
                sampler.sample(prompts(), SAMPLING)
            assert tokens(other.sample(prompts(), SAMPLING)) == tokens(expected)
        assert tokens(sampler.sample(prompts(), SAMPLING)) == tokens(expected)


def test_the_sampler_of_a_program_serves_what_its_policy_publishes() -> None:
    """In the threads of the program. A sampler of the library keeps the weights of its own."""
    served = clotho.load(str(policy().files), method=clotho.LoRA(rank=2))

    async def complete() -> clotho.Completion:
        ((one,),) = await sampler.client.complete_all(
            [SampleRequest(prompt=prompts()[0], sampling=SAMPLING, seeds=(1,))]
        )
        return one

    async def score(one: clotho.Completion) -> tuple[float, ...]:
        scored = await sampler.prompt_logprobs((*prompts()[0], *one.tokens))
        assert scored.version == one.versions[0]
        return scored.logprobs[len(prompts()[0]) - 1 :]

    with compute_thread() as compute:
        sampler = Sampler(served, threads=OwnThreads(compute=compute, settings=EngineSection(max_num_seqs=4)))
        assert sampler.engine.stats().rows_limit == 4
        assert sampler.served == WeightsReady(version=0, step=0, fingerprint=served.fingerprint)
        publish = partial(served.publish, served.trainable(), version=7, step=8, fingerprint="f")
        compute.decode.submit(publish).result()
        assert sampler.served == WeightsReady(version=7, step=8, fingerprint="f")
        one = asyncio.run(complete())
        assert set(one.versions) == {7}
        assert asyncio.run(score(one)) == pytest.approx(one.logprobs, abs=1e-3)
        with pytest.raises(RequestError):
            asyncio.run(sampler.prompt_logprobs(prompts()[0], weights="unknown"))


@pytest.mark.parametrize(("backend", "expected"), [("CPU", [0.0]), ("Metal", [0.25, 0.25])])
def test_on_a_gpu_prefill_and_scoring_take_turns_without_a_learner_too(
    monkeypatch: pytest.MonkeyPatch, backend: str, expected: list[float]
) -> None:
    """So in `serve` and `eval`: macOS ends a process whose work delays the display."""
    limits: list[float] = []

    def turns(seconds: float, lane: Any) -> TurnBudget:
        limits.append(seconds)
        return TurnBudget(seconds, lane)

    monkeypatch.setattr("clotho.sampler.backend_name", lambda: backend)
    monkeypatch.setattr("clotho.sampler.TurnBudget", turns)
    with compute_thread() as compute:
        sampler = Sampler(policy(), threads=OwnThreads(compute=compute, settings=EngineSection()))
        assert [len(group) for group in sampler.sample(prompts(), SAMPLING)] == [1, 1, 1]
    assert limits == expected


def test_a_failed_step_in_a_program_is_its_failure_until_it_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program decides what happens to its requests."""

    async def fail() -> None:
        task = asyncio.create_task(sampler.sample_async(prompts(), SAMPLING))
        with pytest.raises(MemoryError):
            await finish(sampler.failure)
        compute.decode.submit(lambda: sampler.engine.fail_all("it failed")).result()
        with pytest.raises(GenerationError):
            await task

    def broken() -> int:
        raise MemoryError("no memory")

    with compute_thread() as compute:
        sampler = Sampler(policy(), threads=OwnThreads(compute=compute, settings=EngineSection()))
        with monkeypatch.context() as patched:
            patched.setattr(sampler.engine, "tick", broken)
            asyncio.run(fail())
        assert not sampler.restart().done()
        assert [len(group) for group in sampler.sample(prompts(), SAMPLING)] == [1, 1, 1]


def test_what_is_no_prompt_is_refused() -> None:
    """Text must be rendered first, and one prompt is not many."""
    with clotho.Sampler(policy()) as sampler:
        for wrong in (["What is 2 + 3?"], "What is 2 + 3?", prompts()[0]):
            with pytest.raises(TypeError):
                sampler.sample(wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError) as caught:
            sampler.sample([(10**9,)])
        assert caught.value.param == "prompt"
        with pytest.raises(ValueError, match="argument"):
            sampler.score(prompts(), [])
        with pytest.raises(ValueError, match="temperature"):
            sampler.score(prompts()[:1], [(1,)], temperature=0.0)
    with pytest.raises(ProfileError):
        clotho.Sampler(policy(), max_num_seqs=0)


def test_a_learner_of_another_policy_is_not_published() -> None:
    """Its arrays belong to other modules."""
    other = clotho.load(str(policy().files), method=clotho.LoRA(rank=2))
    with clotho.Sampler(policy()) as sampler, pytest.raises(ValueError, match="another policy"):
        sampler.publish(clotho.Learner(other))


def test_a_chat_is_a_text_a_problem_or_messages() -> None:
    """All are rendered with the template of the model."""
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    problem = clotho.Problem(prompt="What is 2 + 3?", answer="5", type="sum")
    assert policy().chat("What is 2 + 3?") == policy().chat(messages) == policy().chat(problem)
