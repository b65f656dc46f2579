"""Mock of environments and their API server: single-turn groups, sampled over the real HTTP API of the policy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import anyio
import httpx
import msgspec
import structlog
from msgspec import Raw, Struct

from attachments.atropos.validation import MASKED
from clotho.settings.engine import SamplingSection
from protocols.prompt import Prompt
from protocols.rollout import GroupRewards, RolloutGroup
from protocols.sampling import PARAMETERS, Completion, FinishReason

LABEL = "mock"
TIMEOUT = httpx.Timeout(connect=5.0, read=1200.0, write=30.0, pool=None)
MAX_CONNECTIONS = 32
MASKED_LOGPROB = 1.0
"""Log-probability that marks a token that is not trained on."""

log = structlog.get_logger(actor="atropos_fetcher")


class _GenerateResponse(Struct, frozen=True, kw_only=True):
    """The used fields of the response of POST /generate: lists of n.

    logprobs: one list per completion, one (token -> log-probability,) per position.
    """

    text: list[str]
    token_ids: list[list[int]]
    logprobs: list[list[tuple[dict[int, float]]]]
    finish_reasons: list[FinishReason]


class MockAtropos:
    """A source of groups that samples each batch itself, with all groups of a batch in parallel.

    The prompts come from the profile's dataset. The completions are sampled with POST /generate in vLLM's format, in as
    few requests as the API allows, and scored with the profile's rewards. A group that fails is logged and skipped.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str,
        make_prompt: Callable[[int], Prompt],
        first_prompt: int,
        rewards: GroupRewards,
        sampling: SamplingSection,
        batch_size: int,
        max_choices: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """url: of the policy's HTTP API. make_prompt: number -> prompt, called from `first_prompt` on.

        batch_size: in groups. max_choices: limit of completions per request. transport: replaces the network in tests.
        """
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}:{LABEL}"},
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            transport=transport,
            trust_env=False,
        )
        self._make_prompt, self._numbers, self._rewards = make_prompt, count(first_prompt), rewards
        self._sampling, self._batch_size, self._max_choices = sampling, batch_size, max_choices

    async def open(self, *, step: int) -> None:
        """Do nothing: the mock needs no registration."""

    async def batch(self, *, step: int) -> list[Raw] | None:
        """Sample the groups of one batch; None if every group failed."""
        groups: list[Raw | None] = [None] * self._batch_size

        async def sample(place: int, prompt: Prompt) -> None:
            groups[place] = await self._group(prompt)

        async with anyio.create_task_group() as tasks:
            for place in range(self._batch_size):
                tasks.start_soon(sample, place, self._make_prompt(next(self._numbers)))
        return [group for group in groups if group is not None] or None

    async def waiting_for(self) -> str:
        """Return one line that refers to the log."""
        return "the mock could not sample a group; see the warnings above"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _group(self, prompt: Prompt) -> Raw | None:
        responses, size = list[_GenerateResponse](), self._sampling.group_size
        try:
            for begin in range(0, size, self._max_choices):
                responses.append(await self._generate(prompt, begin, min(self._max_choices, size - begin)))
            completions = [completion for response in responses for completion in _completions(response)]
        except (httpx.HTTPError, msgspec.MsgspecError, ValueError) as error:
            log.warning("mock_group_failed", error=f"{type(error).__name__}: {error}")
            return None
        scored = await self._rewards.score(RolloutGroup(prompt=prompt, completions=tuple(completions)))
        if not scored.rewards:
            log.warning("mock_group_not_scored", error=getattr(scored, "detail", ""))
            return None
        return Raw(msgspec.json.encode(_scored_data(prompt, completions, scored.rewards)))

    async def _generate(self, prompt: Prompt, begin: int, completions: int) -> _GenerateResponse:
        sampling = self._sampling
        fields: dict[str, Any] = {
            "prompt": {"prompt_token_ids": prompt.tokens},
            "n": completions,
            "seed": (prompt.seed + begin) % 2**63,
            "logprobs": 0,
            **{
                name: getattr(sampling, name) for name, parameter in PARAMETERS.items() if parameter.affects != "report"
            },
            "logit_bias": dict(sampling.logit_bias),
        }
        headers = {"content-type": "application/json"}
        response = await self._http.post("/generate", content=msgspec.json.encode(fields), headers=headers)
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_GenerateResponse)


def _completions(response: _GenerateResponse) -> list[Completion]:
    """Return the completions for the rewards, which do not use policy versions."""
    return [
        Completion(
            tokens=tuple(tokens),
            logprobs=tuple(next(iter(position.values())) for (position,) in logprobs),
            versions=(0,) * len(tokens),
            text=text,
            finish_reason=reason,
        )
        for text, tokens, logprobs, reason in zip(
            response.text, response.token_ids, response.logprobs, response.finish_reasons, strict=True
        )
    ]


def _scored_data(prompt: Prompt, completions: list[Completion], rewards: tuple[float, ...]) -> dict[str, Any]:
    """Return the 14 fields of a group in the format of the API server."""
    prompt_length = len(prompt.tokens)
    unused = ("advantages", "ref_logprobs", "messages", "generation_params", "overrides", "group_overrides", "images")
    return {
        "tokens": [(*prompt.tokens, *completion.tokens) for completion in completions],
        "masks": [(*(MASKED,) * prompt_length, *completion.tokens) for completion in completions],
        "scores": rewards,
        "inference_logprobs": [
            (*(MASKED_LOGPROB,) * prompt_length, *completion.logprobs) for completion in completions
        ],
        "env_id": 0,
        "distill_token_ids": None,
        "distill_logprobs": None,
        **dict.fromkeys(unused),
    }
