"""What to sample and what came of it: the contract of the decode engine with everything that asks it for tokens.

What a policy thinks of a prompt: the contract of the compute thread with who asks for log-probabilities of text.

Which sampling can be learned from: the learner must be able to evaluate the very distribution that was sampled.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocols.errors import ProfileError

MAX_SUPPORT = 256
"""The most tokens per draw whose numbers are recorded for the learner."""

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]

FinishReason = Literal["stop", "length", "abort"]


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sequence is sampled. The defaults draw from the model's own distribution.

    temperature: 0 means greedy; its log-probabilities are then those of the untempered distribution.
    top_p, top_k, min_p: nucleus, count (0 = all) and relative floor; applied in that order after the temperature.
    repetition_penalty: as CTRL (arXiv:1909.05858): divides positive, multiplies negative logits of tokens seen in
        prompt or completion. 1 = off.
    logit_bias: (token, bias) pairs added to the raw logits.
    max_tokens: completion tokens, the stop token included.
    stop: strings that end the completion (removed from its text).
    stop_token_ids: tokens that do (kept in `tokens`), besides the model's own end tokens.
    ignore_eos: the model's own end tokens do not end the completion.
    top_logprobs: how many alternatives to report per token.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: Annotated[int, Meta(ge=1)] = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0


class SampleRequest(Struct, frozen=True, kw_only=True):
    """Anyone -> decode engine: `len(seeds)` completions of one prompt, which is computed once and shared.

    seeds: one 64-bit seed per completion; completion i is a function of (weights, prompt, sampling, seeds[i]) alone.
    stream: report every token as it is sampled, not only the finished completions.
    reuse_prefix: look the prompt up in the prefix cache, and leave it there.
    record_support: report with each completion which tokens could have been sampled (`Completion.supports`), where top-p,
        top-k or min-p leave some out; needs 1 <= top_k <= MAX_SUPPORT.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    stream: bool = False
    reuse_prefix: bool = False
    record_support: bool = False


class Completion(Struct, frozen=True, kw_only=True):
    """One finished completion.

    tokens: completion only, the end token included when one was sampled.
    logprobs: natural log, under the distribution each token was really sampled from; as long as `tokens`.
    versions: the weights that drew each token; as long as `tokens`, never decreasing unless an environment put turns
        together that were sampled out of order.
    sampled: whether the policy drew the token; empty: all of them. What an environment put in between (the answer of a
        tool, the next question) is read and never learned from: its log-probability is 0 and its version is that of the
        token before.
    text: the decoded completion, without end token, special tokens or the stop string.
    stop_reason: the stop string or token that ended it, if one did.
    top_logprobs: per token, up to `Sampling.top_logprobs` (token, log-probability) pairs, best first.
    supports: per token, the tokens that could have been sampled, as little-endian uint32 numbers in ascending order;
        empty where it was not asked for, or where the whole vocabulary could.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    supports: tuple[bytes, ...] = ()
    sampled: tuple[bool, ...] = ()

    @property
    def length(self) -> int:
        """How many of its tokens the policy drew."""
        return sum(self.sampled) if self.sampled else len(self.tokens)

    def __post_init__(self) -> None:
        """Refuse completions whose parallel fields differ in length."""
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError("tokens, logprobs and versions of a completion must have equal length")
        if self.sampled and len(self.sampled) != len(self.tokens):
            raise ValueError("sampled must say of every token of a completion whether the policy drew it")
        if self.supports and len(self.supports) != len(self.tokens):
            raise ValueError(f"{len(self.supports)} supports for {len(self.tokens)} tokens of a completion")


class TokenDrawn(Struct, frozen=True, kw_only=True, tag=True):
    """Decode engine -> client_label, only where `SampleRequest.stream`: the next token of completion `index`.

    text: what became certain with this token; held back while it may turn into a stop string or half a character.
    """

    index: int
    token: int
    logprob: float
    version: int
    text: str
    top_logprobs: tuple[tuple[int, float], ...] = ()


class CompletionDone(Struct, frozen=True, kw_only=True, tag=True):
    """Decode engine -> client_label: completion `index` has ended. `tail` is text not yet sent as `TokenDrawn.text`."""

    index: int
    completion: Completion
    tail: str = ""


class SampleFailed(Struct, frozen=True, kw_only=True, tag=True):
    """Decode engine -> client_label: nothing further will come of this request, and why."""

    reason: str


SampleEvent = TokenDrawn | CompletionDone | SampleFailed


class PromptLogprobs(Struct, frozen=True, kw_only=True):
    """Natural logs, under the policy's own distribution (temperature 1, nothing cut off), of given tokens.

    version: the weights that all of it was computed with.
    logprobs: of every token but the first, given those before it.
    top_logprobs: in the same places, the most probable (token, log-probability) pairs, best first.
    """

    version: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]

    def __post_init__(self) -> None:
        """Refuse parallel fields that differ in length."""
        if len(self.logprobs) != len(self.top_logprobs):
            raise ValueError(f"{len(self.top_logprobs)} top_logprobs for {len(self.logprobs)} logprobs of a prompt")


def restricts_support(sampling: Sampling) -> bool:
    """Whether tokens are sampled from a part of the vocabulary, which then has to be recorded."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def require_learnable(sampling: Sampling) -> None:
    """Raise ProfileError for sampling whose log-probabilities the learner would evaluate under another distribution.

    Temperature and bias it computes itself; what top-p, top-k and min-p left is replayed, up to `MAX_SUPPORT` tokens.
    """
    if sampling.temperature == 0.0:
        raise ProfileError("sampling.temperature = 0 is greedy: groups would be equal and nothing could be learned")
    if sampling.repetition_penalty != 1.0:
        raise ProfileError(
            f"sampling.repetition_penalty = {sampling.repetition_penalty:g}: the learner does not evaluate it; "
            "leave it at 1"
        )
    if restricts_support(sampling) and not 1 <= sampling.top_k <= MAX_SUPPORT:
        raise ProfileError(
            f"sampling.top_k = {sampling.top_k}: what top_p, top_k and min_p leave is recorded for the learner, at "
            f"most {MAX_SUPPORT} tokens: set sampling.top_k to 1 to {MAX_SUPPORT}"
        )
