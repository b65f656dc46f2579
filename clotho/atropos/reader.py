"""Reads what environments send: every field of a group is checked, and honoured or refused.

From a group that was checked to the message that the learner takes.

What is remembered from one group to the next, within bounds: who sends them, and which came of late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from anyio.to_thread import run_sync
from msgspec import Raw, Struct
from numpy.typing import NDArray

from clotho.atropos.behaviour_logprobs import Behaviour, Memory, behaviour, runs, versions
from clotho.atropos.validation import Bounds, CheckedGroup, check, teacher_tokens
from clotho.atropos.wire import Refused, WireGroup, decode_group, sender
from clotho.config.schema import AtroposSection, LearnerSection
from protocols.errors import GenerationError
from protocols.prompt import Problem, Prompt
from protocols.rollout import (
    ZERO_VARIANCE_THRESHOLD,
    Discarded,
    DiscardReason,
    GroupOutcome,
    RolloutGroup,
    ScoredGroup,
    TeacherTokens,
)
from protocols.sampling import Completion, FinishReason, PromptLogprobs, Sampling, restricts_support

BEYOND_THE_GROUP = ("batch", "environment")
"""Values of `learner.advantage` by which equal rewards may teach something."""


class Reading(Struct, frozen=True, kw_only=True):
    """A group that nothing is wrong with, and how each sequence of it was sampled."""

    group: WireGroup
    checked: CheckedGroup
    sequences: list[Behaviour]
    teacher: tuple[TeacherTokens, ...]


def outcome(
    reading: Reading,
    *,
    group_id: int,
    source: str,
    decode: Callable[[Sequence[int]], str],
    sampling: Sampling,
    learner: LearnerSection,
    context_length: int,
) -> GroupOutcome:
    """Make the message; a group whose rewards are all equal is discarded, with all that is known of it.

    The prompt is what all sequences begin with before anything was sampled; the rest of each is its completion.
    """
    checked, sequences = reading.checked, reading.sequences
    opening = reading.group.tokens[0][: checked.common]
    prompt = Prompt(
        group_id=group_id,
        problem=Problem(prompt=decode(opening), answer="", type=source),
        tokens=tuple(opening),
        seed=0,
        source=source,
    )
    completions = tuple(
        _completion(reading, i, decode, most=sampling.max_tokens, context_length=context_length)
        for i in range(len(sequences))
    )
    rewards = checked.rewards
    teaches = checked.advantages or reading.teacher or learner.advantage in BEYOND_THE_GROUP
    if not teaches and max(rewards) - min(rewards) <= ZERO_VARIANCE_THRESHOLD:
        detail = f"all {len(rewards)} rewards are {rewards[0]:g}"
        return Discarded(prompt=prompt, reason="zero_variance", detail=detail, completions=completions, rewards=rewards)
    temperatures = tuple(sequence.temperature for sequence in sequences)
    differences = [sequence.difference for sequence in sequences if sequence.difference is not None]
    wants_reference = learner.reference == "environment" and learner.kl_beta > 0
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, completions=completions),
        rewards=rewards,
        parts={},
        token_advantages=_rest(checked.advantages, checked.common),
        reference_logprobs=_rest(checked.reference, checked.common) if wants_reference else (),
        temperatures=temperatures if set(temperatures) != {sampling.temperature} else (),
        zero_advantage=checked.zero_advantage if any(checked.zero_advantage) else (),
        teacher=reading.teacher,
        logprob_error=max(differences, default=None),
    )


def nothing_but_a_number(group_id: int, source: str) -> Prompt:
    """The prompt of a group of which nothing else is kept."""
    return Prompt(
        group_id=group_id, problem=Problem(prompt="", answer="", type=source), tokens=(), seed=0, source=source
    )


def _completion(
    reading: Reading, index: int, decode: Callable[[Sequence[int]], str], *, most: int, context_length: int
) -> Completion:
    common, sequence = reading.checked.common, reading.sequences[index]
    trained_T = reading.checked.trained[index]
    tokens = reading.group.tokens[index][common:]
    supports = tuple(sequence.supports.get(t, b"") for t in range(common, trained_T.size))
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(sequence.logprob_T[common:].tolist()),
        versions=tuple(versions(sequence, trained_T)[common:].tolist()),
        text=decode(tokens),
        finish_reason=sequence.finish_reason or _finish_reason(trained_T, most, context_length),
        supports=supports if any(supports) else (),
        sampled=() if trained_T[common:].all() else tuple(trained_T[common:].tolist()),
    )


def _finish_reason(trained_T: NDArray[Any], most: int, context_length: int) -> FinishReason:
    """What the engine does not remember had room left, or had not."""
    spans = runs(trained_T)
    full = spans and spans[-1][1] - spans[-1][0] >= most
    return "length" if full or trained_T.size >= context_length else "stop"


def _rest(rows: Sequence[NDArray[Any]], common: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row_T[common:].tolist()) for row_T in rows)


MOST_NAMES = 64
REMEMBERED = 4096
LARGEST_NUMBER = 2**31


class EnvironmentNames:
    """Names of environments: at most `MOST_NAMES` are ever given out, and further ones are all `other`.

    The best name is the label with which an environment asks the engine; it is remembered by the environment's number
    for groups that do not show it.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._labels: dict[int, str] = {}

    def name(self, env_id: int | None, client_label: str = "") -> str:
        """Return the name of the environment with this number, which asked under this label, if it is known."""
        number = env_id if env_id is not None and 0 <= env_id < LARGEST_NUMBER else None
        if client_label and number is not None and (number in self._labels or len(self._labels) < MOST_NAMES):
            self._labels[number] = client_label
        label = client_label or (self._labels.get(number, "") if number is not None else "")
        name = label or ("environment" if number is None else f"environment {number}")
        if name not in self._given and len(self._given) >= MOST_NAMES:
            return "other"
        self._given.add(name)
        return name


class RecentGroups:
    """Fingerprints of the latest `REMEMBERED` groups."""

    def __init__(self) -> None:
        self._order: deque[bytes] = deque()
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def saw(self, group: WireGroup) -> bool:
        """Tell whether the same group came before, and remember it.

        The same are tokens, masks, scores and the log-probabilities that came with them: two draws of the same few
        tokens from different weights are not the same group.
        """
        key = _fingerprint(group)
        if key in self._known:
            return True
        if len(self._order) == REMEMBERED:
            self._known.remove(self._order.popleft())
        self._order.append(key)
        self._known.add(key)
        return False


def _fingerprint(group: WireGroup) -> bytes:
    """128 bits of BLAKE2b over the rows, each after its length."""
    digest = blake2b(digest_size=16)
    for integers in (*group.tokens, *group.masks):
        digest.update(len(integers).to_bytes(8, "little") + np.array(integers, dtype=np.int32).tobytes())
    for numbers in (group.scores, *(group.inference_logprobs or ())):
        digest.update(len(numbers).to_bytes(8, "little") + np.array(numbers, dtype=np.float64).tobytes())
    return digest.digest()


Recompute = Callable[[tuple[int, ...], float], Awaitable[PromptLogprobs]]
"""recompute(tokens, temperature) -> log-probability of every token but the first, under the weights that serve."""


class _Repeated(Exception):
    """The group came before."""


class Policy(Struct, frozen=True, kw_only=True):
    """What the reader must know of the policy: its bounds, and how its tokens become text, in any thread."""

    bounds: Bounds
    decode: Callable[[Sequence[int]], str]


class GroupReader:
    """Turns a group in JSON into what the learner takes, or says why not.

    A group that is refused costs nothing to keep: neither tokens nor completions of it remain. Parsing and checking run
    in a worker thread, one group at a time.
    """

    def __init__(
        self,
        *,
        memory: Memory,
        policy: Policy,
        recompute: Recompute,
        sampling: Sampling,
        learner: LearnerSection,
        settings: AtroposSection,
    ) -> None:
        """memory: how the engine drew what environments asked it for."""
        self._memory, self._policy, self._recompute = memory, policy, recompute
        self._sampling, self._learner, self._settings = sampling, learner, settings
        self._names = EnvironmentNames()
        self._recent = RecentGroups()

    async def read(self, raw: Raw, *, group_id: int, version: int) -> GroupOutcome:
        """Read a group; version: of the weights that serve. Never raises for what is in `raw`."""
        ended = partial(self._discarded, raw, group_id)
        try:
            reading = await run_sync(self._check, raw, version)
            if any(sequence.unknown for sequence in reading.sequences):
                await self._fill_in(reading)
            return await run_sync(self._outcome, reading, group_id)
        except _Repeated:
            return await run_sync(ended, "duplicate", "the same group came before")
        except Refused as refusal:
            return await run_sync(ended, "invalid", str(refusal))
        except GenerationError as error:
            return await run_sync(ended, "generation_error", str(error))

    def _check(self, raw: Raw, version: int) -> Reading:
        group = decode_group(raw)
        checked = check(group, self._policy.bounds)
        self._learn_name(group, checked)
        learner = self._learner
        if learner.advantage == "environment" and not checked.advantages:
            raise Refused('advantages: none, and learner.advantage = "environment" learns from them')
        if learner.reference == "environment" and learner.kl_beta > 0 and not checked.reference:
            raise Refused('ref_logprobs: none, and learner.reference = "environment" needs them')
        teacher = teacher_tokens(group, checked, self._policy.bounds.vocab_size) if learner.distillation_weight else ()
        sequences = [
            behaviour(i, tokens, checked, self._memory, version=version, temperature=self._sampling.temperature)
            for i, tokens in enumerate(group.tokens)
        ]
        self._refuse_unknown(sequences)
        sampled = not any(
            sequence.unknown for sequence in sequences
        )  # a text that is shown again is no draw sent twice
        if sampled and self._recent.saw(group):
            raise _Repeated
        return Reading(group=group, checked=checked, sequences=sequences, teacher=teacher)

    def _learn_name(self, group: WireGroup, checked: CheckedGroup) -> None:
        """Who asked the engine is the sender, also of a group that is refused in what follows."""
        for tokens, trained_T in zip(group.tokens, checked.trained, strict=True):
            for start, end in runs(trained_T)[:1]:
                if (sampled := self._memory.find(tokens, start, end)) and sampled.client_label:
                    self._names.name(group.env_id, sampled.client_label)
                    return

    def _refuse_unknown(self, sequences: Sequence[Behaviour]) -> None:
        for i, sequence in enumerate(sequences):
            if sequence.unremembered and restricts_support(self._sampling):
                start, end = sequence.unremembered[0]
                raise Refused(
                    f"tokens[{i}][{start}:{end}]: the engine does not remember what top_p, top_k and min_p left of it"
                )
            if sequence.unknown and self._settings.missing_logprobs == "refuse":
                start, end = sequence.unknown[0]
                raise Refused(
                    f"inference_logprobs: none, and the engine does not remember tokens[{i}][{start}:{end}] "
                    '(atropos.missing_logprobs = "recompute" would compute them)'
                )

    async def _fill_in(self, reading: Reading) -> None:
        """Compute, with the weights that serve, what neither the engine nor the environment remembers."""
        for tokens, sequence in zip(reading.group.tokens, reading.sequences, strict=True):
            if sequence.unknown:
                scored = await self._recompute(tuple(tokens), sequence.temperature)
                logprob_T = np.array((0.0, *scored.logprobs), dtype=np.float32)
                for start, end in sequence.unknown:
                    sequence.logprob_T[start:end] = np.minimum(logprob_T[start:end], 0.0)
                    sequence.version_T[start:end] = scored.version

    def _outcome(self, reading: Reading, group_id: int) -> GroupOutcome:
        client_label = next((sequence.client_label for sequence in reading.sequences if sequence.client_label), "")
        source = self._names.name(reading.group.env_id, client_label)
        return outcome(
            reading,
            group_id=group_id,
            source=source,
            decode=self._policy.decode,
            sampling=self._sampling,
            learner=self._learner,
            context_length=self._policy.bounds.context_length,
        )

    def _discarded(self, raw: Raw, group_id: int, reason: DiscardReason, detail: str) -> Discarded:
        return Discarded(
            prompt=nothing_but_a_number(group_id, self._names.name(sender(raw))), reason=reason, detail=detail
        )
