"""Groups as an environment sends them, an engine that remembers, and a reader of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from clotho.atropos.reader import GroupReader, Policy
from clotho.atropos.validation import Bounds
from clotho.config.schema import AtroposSection, LearnerSection
from clotho.inference.sample_log import SampleLog
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup
from protocols.sampling import Completion, PromptLogprobs, SampleRequest, Sampling
from tests.fakes import CharacterTokenizer

PROMPT = (5, 9, 33)
BOUNDS = Bounds(vocab_size=97, context_length=64)
SAMPLING = Sampling(max_tokens=8)
VERSION = 7
Turn = tuple[int, ...]


def logprob(token: int) -> float:
    """What every test gives a token that was sampled."""
    return -token / 8


def sequence(*turns: Turn) -> tuple[list[int], list[int], list[float]]:
    """Tokens, masks and log-probabilities of a conversation: what is said to the policy and what it says, in turn."""
    tokens, masks, logprobs = list[int](), list[int](), list[float]()
    for place, turn in enumerate(turns):
        sampled = place % 2 == 1
        tokens += turn
        masks += turn if sampled else [-100] * len(turn)
        logprobs += [logprob(token) if sampled else 1.0 for token in turn]
    return tokens, masks, logprobs


def conversations(*sequences: Sequence[Turn], **fields: Any) -> dict[str, Any]:
    """A group of sequences, each given as for `sequence`; scores 0, 1, 2, ..."""
    tokens, masks, logprobs = zip(*(sequence(*turns) for turns in sequences), strict=True)
    return {
        "tokens": list(tokens),
        "masks": list(masks),
        "scores": [float(i) for i in range(len(sequences))],
        "inference_logprobs": list(logprobs),
        "env_id": 3,
        **fields,
    }


def group(*completions: Turn, **fields: Any) -> dict[str, Any]:
    """A group of single turns after `PROMPT`."""
    return conversations(*((PROMPT, completion) for completion in completions), **fields)


def raw(fields: Any) -> Raw:
    """The same as the server would send it."""
    return Raw(msgspec.json.encode(fields))


class Scene:
    """A reader, what the engine remembers, and what was asked to be computed again."""

    def __init__(
        self, *, sampling: Sampling = SAMPLING, settings: AtroposSection | None = None, **learner: Any
    ) -> None:
        self.memory = SampleLog()
        self.recomputed: list[tuple[tuple[int, ...], float]] = []
        self.reader = GroupReader(
            memory=self.memory,
            policy=Policy(bounds=BOUNDS, decode=CharacterTokenizer().decode),
            recompute=self._recompute,
            sampling=sampling,
            learner=LearnerSection(**learner),
            settings=settings or AtroposSection(),
        )

    def drew(
        self,
        before: Turn,
        tokens: Turn,
        *,
        client_label: str = "",
        version: int = 4,
        support: Turn = (),
        **sampling: Any,
    ) -> None:
        """Let the engine remember a completion."""
        supports = (b"".join(token.to_bytes(4, "little") for token in support),) * len(tokens) if support else ()
        self.memory.remember(
            SampleRequest(prompt=before, sampling=Sampling(**sampling), seeds=(1,)),
            Completion(
                tokens=tokens,
                logprobs=tuple(map(logprob, tokens)),
                versions=(version,) * len(tokens),
                text="",
                finish_reason="length",
                supports=supports,
            ),
            client_label=client_label,
        )

    async def outcome(self, fields: Any, *, group_id: int = 11) -> GroupOutcome:
        """Read a group, given as a dictionary or as JSON."""
        given = fields if isinstance(fields, Raw) else raw(fields)
        return await self.reader.read(given, group_id=group_id, version=VERSION)

    async def scored(self, fields: Any) -> ScoredGroup:
        """Read a group that can be learned from."""
        outcome = await self.outcome(fields)
        assert isinstance(outcome, ScoredGroup), outcome
        return outcome

    async def refused(self, fields: Any, reason: str = "invalid") -> str:
        """Read a group that is discarded; return the detail."""
        outcome = await self.outcome(fields)
        assert isinstance(outcome, Discarded), outcome
        assert outcome.reason == reason, outcome.detail
        assert 0 < len(outcome.detail) < 200
        assert outcome.detail.isprintable()
        return outcome.detail

    async def _recompute(self, tokens: tuple[int, ...], temperature: float) -> PromptLogprobs:
        self.recomputed.append((tokens, temperature))
        rest = tokens[1:]
        logprobs = tuple(-math.log(2 + token) for token in rest)
        return PromptLogprobs(version=9, logprobs=logprobs, top_logprobs=((),) * len(rest))
