"""Reads what environments send: every field of a group is checked, and honoured or refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
from anyio.to_thread import run_sync
from msgspec import Raw, Struct

from clotho.atropos.behaviour_logprobs import Behaviour, Memory, behaviour, runs
from clotho.atropos.messages import Reading, nothing_but_a_number, outcome
from clotho.atropos.recent import EnvironmentNames, RecentGroups
from clotho.atropos.refusal import Refused
from clotho.atropos.teacher import teacher_tokens
from clotho.atropos.validation import Bounds, CheckedGroup, check
from clotho.atropos.wire import WireGroup, decode_group, sender
from clotho.config.schema import AtroposSection, LearnerSection
from clotho.inference.sample_log import cuts
from protocols.errors import GenerationError
from protocols.prompt_logprobs import PromptLogprobs
from protocols.rollout import Discarded, DiscardReason
from protocols.sampling import Sampling
from protocols.score import GroupOutcome

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
        drawn = not any(sequence.unknown for sequence in sequences)  # a text that is shown again is no draw sent twice
        if drawn and self._recent.saw(group):
            raise _Repeated
        return Reading(group=group, checked=checked, sequences=sequences, teacher=teacher)

    def _learn_name(self, group: WireGroup, checked: CheckedGroup) -> None:
        """Who asked the engine is the sender, also of a group that is refused in what follows."""
        for tokens, trained_T in zip(group.tokens, checked.trained, strict=True):
            for start, end in runs(trained_T)[:1]:
                if (drawn := self._memory.find(tokens, start, end)) and drawn.asker:
                    self._names.name(group.env_id, drawn.asker)
                    return

    def _refuse_unknown(self, sequences: Sequence[Behaviour]) -> None:
        for i, sequence in enumerate(sequences):
            if sequence.unremembered and cuts(self._sampling):
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
        asker = next((sequence.asker for sequence in reading.sequences if sequence.asker), "")
        source = self._names.name(reading.group.env_id, asker)
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
