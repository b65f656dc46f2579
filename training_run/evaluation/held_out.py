"""Completions of held-out problems by one pinned policy version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from clotho.inference.engine import DecodeEngine
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.models.turns import UNDIVIDED, TurnBudget
from clotho.settings.engine import EngineSection
from protocols.evaluation import ReferenceLoss
from protocols.prompt import Problem
from protocols.sampling import (
    PARAMETERS,
    Completion,
    CompletionDone,
    PromptLogprobs,
    SampleEvent,
    SampleFailed,
    SampleRequest,
    Sampling,
    derive,
)
from training_run.groups.rollout_source import Episodes
from training_run.profile.mounted import without_settings

NEUTRAL_FILTERS: dict[str, Any] = {
    name: parameter.neutral for name, parameter in PARAMETERS.items() if parameter.learner == "replays support"
}


def greedy(sampling: Sampling) -> Sampling:
    """The sampling parameters of a greedy completion with the same limits and penalties."""
    return replace(sampling, **NEUTRAL_FILTERS, temperature=0.0)


def held_out_requests(
    prompts: Sequence[tuple[int, ...]], sampling: Sampling, *, samples: int, seed: int
) -> list[SampleRequest]:
    """One greedy request per prompt; with `samples`, then one request per prompt for that number of completions.

    The seeds of sampled completions are a function of (seed, index of the prompt), so that evaluations of different
    weights sample with the same random numbers.
    """
    requests = [SampleRequest(prompt=prompt, sampling=greedy(sampling), seeds=(0,)) for prompt in prompts]
    if samples:
        sampled = replace(sampling, top_logprobs=0)
        for index, prompt in enumerate(prompts):
            seeds = tuple(derive(seed, "eval", index, sample) for sample in range(samples))
            requests.append(SampleRequest(prompt=prompt, sampling=sampled, seeds=seeds))
    return requests


async def held_out_completions(
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    complete: Callable[[Sequence[SampleRequest]], Awaitable[list[list[Completion]]]],
    *,
    episodes: Episodes | None,
    samples: int,
    seed: int,
) -> list[list[Completion]]:
    """Return a greedy completion of each problem, then `samples` sampled ones.

    episodes: come in the place of completions, with the seeds of `held_out_requests`.
    """
    if episodes is None:
        requests = held_out_requests(prompts, sampling, samples=samples, seed=seed)
        return by_problem(await complete(requests), len(prompts))
    found = await episodes.held_out(problems, greedy(sampling), [(0,)] * len(problems), complete)
    if not samples:
        return found
    seeds = [tuple(derive(seed, "eval", index, sample) for sample in range(samples)) for index in range(len(problems))]
    further = await episodes.held_out(problems, replace(sampling, top_logprobs=0), seeds, complete)
    return [[*first, *others] for first, others in zip(found, further, strict=True)]


def complete_all(
    engine: DecodeEngine, requests: Sequence[SampleRequest], *, rows: int, pause: Callable[[], None] = lambda: None
) -> list[list[Completion]]:
    """Decode requests with an engine.

    rows: `engine.max_num_seqs`; twice as many completions are requested ahead. pause: called after each decode step.
    Returns the completions of each request, in the order of its seeds. Raises RequestError if a prompt does not fit,
    and RuntimeError if a request fails.
    """
    answers: dict[int, dict[int, Completion]] = {index: {} for index in range(len(requests))}
    failures: list[str] = []
    finished = 0

    def receive(index: int, event: SampleEvent) -> None:
        nonlocal finished
        match event:
            case CompletionDone():
                answers[index][event.index] = event.completion
                finished += 1
            case SampleFailed():
                failures.append(event.reason)

    submitted, started = 0, 0
    while submitted < len(requests) or engine.has_work:
        ahead = finished + 2 * rows  # a full batch, and as many waiting
        while submitted < len(requests) and started < ahead:
            request = requests[submitted]
            engine.submit(replace(request, background=True), partial(receive, submitted))
            submitted, started = submitted + 1, started + len(request.seeds)
        engine.tick()
        if failures:
            raise RuntimeError(f"evaluation failed: {failures[0]}")
        pause()
    return [[answers[index][i] for i in range(len(request.seeds))] for index, request in enumerate(requests)]


def by_problem(completions: Sequence[Sequence[Completion]], problems: int) -> list[list[Completion]]:
    """Return the completions of each problem, the greedy one first. completions: those of `held_out_requests`."""
    sampled = completions[problems:] or [()] * problems
    return [[*first, *others] for first, others in zip(completions[:problems], sampled, strict=True)]


def reference_losses(
    score: Callable[[tuple[int, ...]], PromptLogprobs],
    prompts: Sequence[tuple[int, ...]],
    references: Sequence[tuple[int, ...]],
    *,
    context_length: int,
) -> list[ReferenceLoss | None]:
    """Return the loss of each reference completion after its prompt, at temperature 1 and without sampling filters.

    score: returns the log-probabilities of a sequence under the policy in question. None for an empty reference, and
    for one that is longer than the context together with its prompt. Raises GenerationError if the model's logits are
    not finite.
    """
    losses: list[ReferenceLoss | None] = []
    for prompt, reference in zip(prompts, references, strict=True):
        if not reference or len(prompt) + len(reference) > context_length:
            losses.append(None)
            continue
        nats = -sum(score((*prompt, *reference)).logprobs[-len(reference) :])
        losses.append(ReferenceLoss(nats=nats, tokens=len(reference)))
    return losses


class PinnedSampler:
    """Decodes requests with given weights, in one thread, independent of the served ones.

    It has a model and an engine of its own over the same base weights.
    """

    def __init__(self, policy: Policy, settings: EngineSection, turns: TurnBudget = UNDIVIDED) -> None:
        """turns: limits the duration of prefill in one turn. Call this in the thread that decodes."""
        self._weights, self._turns, self._rows = policy.pinned(), turns, settings.max_num_seqs
        self._engine = DecodeEngine(self._weights, without_settings(settings, EngineSection), turns=turns)

    def completions(
        self, parameters: Parameters, requests: Sequence[SampleRequest], *, version: int
    ) -> list[list[Completion]]:
        """Return the completions of each request. Raises the errors of `complete_all`."""
        self._weights.publish(parameters, version=version, step=0, fingerprint="")
        self._engine.weights_changed("recompute")
        try:
            return complete_all(self._engine, requests, rows=self._rows, pause=self._turns.pause)
        finally:
            self._engine.fail_all("the evaluation has ended")
            self._weights.release()
