"""A stand-in for environments and their API server: single-turn groups, made over the real HTTP API of the policy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import anyio
import httpx
import msgspec
import structlog
from msgspec import Raw, Struct

from clotho.atropos.validation import MASKED
from clotho.config.schema import SamplingSection
from protocols.prompt import Prompt
from protocols.rollout import GroupOutcome, RolloutGroup
from protocols.sampling import PARAMETERS, Completion, FinishReason

LABEL = "mock"
TIMEOUT = httpx.Timeout(connect=5.0, read=1200.0, write=30.0, pool=None)
AT_ONCE = 32
UNTRAINED = 1.0
"""In place of a log-probability where nothing was sampled."""

log = structlog.get_logger(actor="atropos_fetcher")


class Rewards(Protocol):
    """Judges a group; `clotho.rewards.runner.RewardRunner` does."""

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Judge every completion."""


class _Answer(Struct, frozen=True, kw_only=True):
    """What is read of the answer to POST /generate: lists of n; log-probabilities as [(token -> log-probability,)]."""

    text: list[str]
    token_ids: list[list[int]]
    logprobs: list[list[tuple[dict[int, float]]]]
    finish_reasons: list[FinishReason]


class MockAtropos:
    """Makes a batch of groups when it is asked for one, all at the same time.

    A group is what an environment would send: its prompt is asked of the policy by POST /generate, in vLLM's shape and
    in as few requests as the API allows, and its completions are rewarded as the profile says. One that fails on the
    way is logged and left out, as an environment would.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str,
        make: Callable[[int], Prompt],
        first: int,
        rewards: Rewards,
        sampling: SamplingSection,
        batch_size: int,
        max_choices: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """url: of the policy's HTTP API. make: number -> prompt, asked from `first` on. batch_size: in groups.

        max_choices: the most completions of one request. transport: in place of the network.
        """
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}:{LABEL}"},
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=AT_ONCE),
            transport=transport,
            trust_env=False,
        )
        self._make, self._numbers, self._rewards = make, count(first), rewards
        self._sampling, self._batch_size, self._max_choices = sampling, batch_size, max_choices

    async def open(self, *, step: int) -> None:
        """Nothing need be registered with."""

    async def batch(self, *, step: int) -> list[Raw] | None:
        """Make the groups of one batch; None if not one came about."""
        groups: list[Raw | None] = [None] * self._batch_size

        async def make(place: int, prompt: Prompt) -> None:
            groups[place] = await self._group(prompt)

        async with anyio.create_task_group() as tasks:
            for place in range(self._batch_size):
                tasks.start_soon(make, place, self._make(next(self._numbers)))
        return [group for group in groups if group is not None] or None

    async def waiting_for(self) -> str:
        """Say that it makes the groups itself."""
        return "the stand-in asks the policy itself: see the warnings before"

    async def close(self) -> None:
        """Give up the connections."""
        await self._http.aclose()

    async def _group(self, prompt: Prompt) -> Raw | None:
        answers, size = list[_Answer](), self._sampling.group_size
        try:
            for begin in range(0, size, self._max_choices):
                answers.append(await self._ask(prompt, begin, min(self._max_choices, size - begin)))
            completions = [completion for answer in answers for completion in _completions(answer)]
        except (httpx.HTTPError, msgspec.MsgspecError, ValueError) as error:
            log.warning("a group could not be made", error=f"{type(error).__name__}: {error}")
            return None
        scored = await self._rewards.score(RolloutGroup(prompt=prompt, completions=tuple(completions)))
        if not scored.rewards:
            log.warning("a group could not be rewarded", error=getattr(scored, "detail", ""))
            return None
        return Raw(msgspec.json.encode(_scored_data(prompt, completions, scored.rewards)))

    async def _ask(self, prompt: Prompt, begin: int, completions: int) -> _Answer:
        sampling = self._sampling
        fields: dict[str, Any] = {
            "prompt": {"prompt_token_ids": prompt.tokens},
            "n": completions,
            "seed": (prompt.seed + begin) % 2**63,
            "logprobs": 0,
            **{name: getattr(sampling, name) for name, one in PARAMETERS.items() if one.affects != "report"},
            "logit_bias": dict(sampling.logit_bias),
        }
        headers = {"content-type": "application/json"}
        response = await self._http.post("/generate", content=msgspec.json.encode(fields), headers=headers)
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_Answer)


def _completions(answer: _Answer) -> list[Completion]:
    """As the rewards want them; which weights drew them is not their concern."""
    return [
        Completion(
            tokens=tuple(tokens),
            logprobs=tuple(next(iter(position.values())) for (position,) in logprobs),
            versions=(0,) * len(tokens),
            text=text,
            finish_reason=reason,
        )
        for text, tokens, logprobs, reason in zip(
            answer.text, answer.token_ids, answer.logprobs, answer.finish_reasons, strict=True
        )
    ]


def _scored_data(prompt: Prompt, completions: list[Completion], rewards: tuple[float, ...]) -> dict[str, Any]:
    """The 14 fields of a group as an API server hands it out."""
    before = len(prompt.tokens)
    unused = ("advantages", "ref_logprobs", "messages", "generation_params", "overrides", "group_overrides", "images")
    return {
        "tokens": [(*prompt.tokens, *one.tokens) for one in completions],
        "masks": [(*(MASKED,) * before, *one.tokens) for one in completions],
        "scores": rewards,
        "inference_logprobs": [(*(UNTRAINED,) * before, *one.logprobs) for one in completions],
        "env_id": 0,
        "distill_token_ids": None,
        "distill_logprobs": None,
        **dict.fromkeys(unused),
    }
