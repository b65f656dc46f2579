"""Groups in the format of an environment, and a group reader with a sample log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from attachments.atropos.reader import GroupReader
from attachments.atropos.sample_log import SampleLog
from attachments.atropos.validation import Bounds
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup
from protocols.sampling import Completion, ExpertRoutes, PromptLogprobs, SampleRequest, Sampling
from tests.fakes import CharacterTokenizer
from tests.learner_settings import learner_settings

PROMPT = (5, 9, 33)
BOUNDS = Bounds(vocab_size=97, context_length=64)
SAMPLING = Sampling(max_tokens=8)
VERSION = 7
Turn = tuple[int, ...]


def logprob(token: int) -> float:
    """Return the log-probability that the tests use for a sampled token."""
    return -token / 8


def sequence(*turns: Turn) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, masks and log-probabilities of a conversation; the policy samples every second turn."""
    tokens, masks, logprobs = list[int](), list[int](), list[float]()
    for place, turn in enumerate(turns):
        sampled = place % 2 == 1
        tokens += turn
        masks += turn if sampled else [-100] * len(turn)
        logprobs += [logprob(token) if sampled else 1.0 for token in turn]
    return tokens, masks, logprobs


def conversations(*sequences: Sequence[Turn], **fields: Any) -> dict[str, Any]:
    """Return a group of conversations with the scores 0, 1, 2, ..."""
    tokens, masks, logprobs = zip(*(sequence(*turns) for turns in sequences), strict=True)
    return {
        "tokens": list(tokens), "masks": list(masks), "scores": [float(i) for i in range(len(sequences))],
        "inference_logprobs": list(logprobs), "env_id": 3, **fields,
    }  # fmt: skip


def group(*completions: Turn, **fields: Any) -> dict[str, Any]:
    """Return a group of single-turn conversations after `PROMPT`."""
    return conversations(*((PROMPT, completion) for completion in completions), **fields)


def raw(fields: Any) -> Raw:
    """Return the fields as JSON."""
    return Raw(msgspec.json.encode(fields))


class ReaderHarness:
    """A group reader, its sample log, and the arguments of all recomputations."""

    def __init__(
        self,
        *,
        sampling: Sampling = SAMPLING,
        missing_logprobs: Literal["recompute", "refuse"] = "refuse",
        **learner: Any,
    ) -> None:
        self.sample_log = SampleLog()
        self.recomputed: list[tuple[tuple[int, ...], float]] = []
        self.reader = GroupReader(
            sample_log=self.sample_log,
            bounds=BOUNDS,
            decode=CharacterTokenizer().decode,
            recompute=self._recompute,
            sampling=sampling,
            learner=learner_settings(**learner),
            missing_logprobs=missing_logprobs,
        )

    def record(
        self,
        before: Turn,
        tokens: Turn,
        *,
        client_label: str = "",
        version: int = 4,
        support: Turn = (),
        route: int = 0,
        **sampling: Any,
    ) -> None:
        """Add a completion to the sample log. route: byte of the route of every token; 0: none were recorded."""
        experts = bytes([route]) * (len(before) + len(tokens) - 1)
        supports = (b"".join(token.to_bytes(4, "little") for token in support),) * len(tokens) if support else ()
        self.sample_log.remember(
            SampleRequest(prompt=before, sampling=Sampling(**sampling), seeds=(1,)),
            Completion(
                tokens=tokens,
                logprobs=tuple(map(logprob, tokens)),
                versions=(version,) * len(tokens),
                text="",
                finish_reason="length",
                supports=supports,
                routes=ExpertRoutes(experts=experts, layers=1, per_token=1, number_bytes=1) if route else None,
            ),
            client_label=client_label,
        )

    async def outcome(self, fields: Any, *, group_id: int = 11) -> GroupOutcome:
        """Read a group, given as a dictionary or as JSON."""
        given = fields if isinstance(fields, Raw) else raw(fields)
        return await self.reader.read(given, group_id=group_id, version=VERSION)

    async def scored(self, fields: Any) -> ScoredGroup:
        """Read a group that must be valid."""
        outcome = await self.outcome(fields)
        assert isinstance(outcome, ScoredGroup), outcome
        return outcome

    async def discarded(self, fields: Any, reason: str = "invalid") -> str:
        """Read a group that must be discarded; return the detail."""
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


def complete_group() -> dict[str, Any]:
    """Return a group with all fields."""
    fields = conversations((PROMPT, (40, 41), (50,), (42,)), (PROMPT, (43, 44)), (PROMPT, (45,)))
    lengths = [len(tokens) for tokens in fields["tokens"]]
    return fields | {
        "advantages": [[0.5] * length for length in lengths],
        "ref_logprobs": [[-0.5] * length for length in lengths],
        "messages": [[{"role": "user", "content": "?"}]] * 3,
        "generation_params": {"temperature": 1.0},
        "overrides": [{"set_advantage_to_zero": True}, {"temperature": 0.5}, {}],
        "group_overrides": {"group_size": 3, "temperature": 0.7},
        "images": None,
        "distill_token_ids": [[[1, 2]] * length for length in lengths],
        "distill_logprobs": [[[-1.0, -2.0]] * length for length in lengths],
    }
