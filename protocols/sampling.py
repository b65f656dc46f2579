"""Messages between the decode engine and its clients, and the table of sampling parameters.

The annotations of `Sampling` are the table: type, range, default, neutral value, and support by the learner.
`PARAMETERS` is the same table as rows. The engine's validation, the fields of the HTTP API, the rules for the profile's
[sampling] section, the variables of environments, the sample log and the memory estimate read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate, groupby, pairwise
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct, structs

from protocols.constraints import Constraint

MAX_SUPPORT = 256
"""Maximum number of tokens per position whose identifiers are recorded for the learner."""

MIN_TEMPERATURE = 1e-5
"""Lowest temperature above 0. The quotient of a float16 logit (at most 65504), changed by the lowest repetition penalty
and the largest bias, stays below 1e12, so logits stay finite in float32 (at most 3.4e38)."""

MIN_LOGPROB, MAX_LOGPROB = -9999.0, 1e-3
"""Range of the log-probabilities that other processes report. Values above 0 are rounding errors."""

MIN_REPETITION_PENALTY = 0.01
MAX_TEMPERATURE = 100.0
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS, MAX_STOP_TOKENS = 1024, 128
MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 65_536, 1024, 64

POLICY, BASE = "@policy", "@base"
"""Values of `SampleRequest.weights` beside the names of loaded adapters: the policy, and the model without adapter."""

FinishReason = Literal["stop", "length", "abort"]

Affects = Literal["distribution", "length", "report"]
"""What a parameter changes: the sampling distribution, where a completion ends, or what is reported."""

Learner = Literal["evaluates", "replays support", "cannot evaluate", "not concerned"]
"""What the learner does with a parameter: it applies the parameter to its own logits (`evaluates`), restricts its
softmax to the recorded support (`replays support`), has no implementation (`cannot evaluate`), or does not depend on
the parameter (`not concerned`)."""


def _row(
    description: str,
    *,
    neutral: object,
    affects: Affects = "distribution",
    learner: Learner = "not concerned",
    logits_copies: int = 0,
    least_positive: float = 0.0,
    **constraints: Any,
) -> Meta:
    """Return the annotation of one parameter; `constraints` are those of `msgspec.Meta`."""
    row = {
        "neutral": neutral,
        "affects": affects,
        "learner": learner,
        "logits_copies": logits_copies,
        "least_positive": least_positive,
    }
    return Meta(description=description, extra=row, **constraints)


StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0)]
LogitBias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sequence is sampled. The defaults sample from the model's own distribution.

    Order of application: excluded tokens (allowed tokens, bad words, minimum length), logit bias, repetition penalty,
    frequency and presence penalty, temperature, then top-p, top-k and min-p. With temperature 0 decoding is greedy, and
    the log-probabilities are those of the distribution at temperature 1. An exclusion that would leave no token does
    not apply.
    The repetition penalty is that of CTRL (arXiv:1909.05858); it counts the tokens of the prompt. The frequency and
    presence penalties are those of the OpenAI API; like vLLM's, they count sampled tokens only.
    """

    temperature: Annotated[
        float,
        _row(
            "Divides the logits before sampling; 0 decodes greedily.",
            neutral=1.0,
            learner="evaluates",
            least_positive=MIN_TEMPERATURE,
            ge=0.0,
            le=MAX_TEMPERATURE,
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        _row(
            "Nucleus sampling: keep the smallest set of tokens whose probabilities, before top_k removes any, add up "
            "to this value; 1 keeps all.",
            neutral=1.0,
            learner="replays support",
            gt=0.0,
            le=1.0,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        _row("Keep the k most probable tokens; 0 keeps all.", neutral=0, learner="replays support", ge=0),
    ] = 0
    min_p: Annotated[
        float,
        _row(
            "Keep tokens whose probability is at least this fraction of the highest probability; 0 keeps all.",
            neutral=0.0,
            learner="replays support",
            ge=0.0,
            le=1.0,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        _row(
            "Divides positive and multiplies negative logits of tokens that occurred before; 1 is off.",
            neutral=1.0,
            learner="cannot evaluate",
            logits_copies=4,
            ge=MIN_REPETITION_PENALTY,
            le=10.0,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        _row(
            "Subtracted from the logits of tokens that the completion contains.",
            neutral=0.0,
            learner="cannot evaluate",
            logits_copies=3,
            ge=-2.0,
            le=2.0,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        _row(
            "Subtracted from the logit of a token once per occurrence in the completion.",
            neutral=0.0,
            learner="cannot evaluate",
            logits_copies=3,
            ge=-2.0,
            le=2.0,
        ),
    ] = 0.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, LogitBias], ...],
        _row(
            "Pairs of a token identifier and a value that is added to its logit.",
            neutral=(),
            learner="evaluates",
            max_length=MAX_LOGIT_BIAS,
        ),
    ] = ()
    max_tokens: Annotated[
        int,
        _row(
            "Maximum number of tokens of a completion, its stop token included.", neutral=None, affects="length", ge=1
        ),
    ] = 512
    min_tokens: Annotated[
        int,
        _row(
            "Number of tokens before which no end token is sampled and no stop string ends a completion.",
            neutral=0,
            learner="cannot evaluate",
            logits_copies=1,
            ge=0,
        ),
    ] = 0
    allowed_token_ids: Annotated[
        tuple[TokenId, ...],
        _row(
            "Tokens that may be sampled; empty allows all.",
            neutral=(),
            learner="cannot evaluate",
            logits_copies=1,
            max_length=MAX_ALLOWED_TOKENS,
        ),
    ] = ()
    bad_words: Annotated[
        tuple[BadWord, ...],
        _row(
            "Sequences of tokens that a completion never contains: the last token is excluded after the others.",
            neutral=(),
            learner="cannot evaluate",
            logits_copies=1,
            max_length=MAX_BAD_WORDS,
        ),
    ] = ()
    stop: Annotated[
        tuple[StopString, ...],
        _row(
            "Strings that end a completion; they are removed from its text.",
            neutral=(),
            affects="length",
            max_length=16,
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        _row(
            "Tokens that end a completion besides the model's end tokens; they are kept in its tokens.",
            neutral=(),
            affects="length",
            max_length=MAX_STOP_TOKENS,
        ),
    ] = ()
    ignore_eos: Annotated[
        bool,
        _row("Continue a completion after the model's end tokens.", neutral=False, affects="length"),
    ] = False
    top_logprobs: Annotated[
        int,
        _row(
            "Number of most probable tokens to report at each position.",
            neutral=0,
            affects="report",
            ge=0,
            le=MAX_TOP_LOGPROBS,
        ),
    ] = 0


class SamplingParameter(Struct, frozen=True, kw_only=True):
    """One row of the table.

    annotation: type with its range, for msgspec. neutral: value without effect; None if there is none. allowed: range
    in words. logits_copies: float32 arrays of the shape of the logits that a decode step holds in addition while the
    parameter is in use. least_positive: lowest allowed value above 0.
    """

    name: str
    annotation: Any
    default: object
    neutral: object
    affects: Affects
    learner: Learner
    allowed: str
    logits_copies: int
    least_positive: float

    @property
    def is_scalar(self) -> bool:
        """Whether the value is one number or boolean."""
        return get_args(self.annotation)[0] in (int, float, bool)


def _parameter(name: str, annotation: Any) -> SamplingParameter:
    base, meta = get_args(annotation)
    default = Sampling.__struct_defaults__[Sampling.__struct_fields__.index(name)]
    return SamplingParameter(
        name=name, annotation=annotation, default=default, allowed=_allowed(base, meta), **meta.extra
    )


def _allowed(base: Any, meta: Meta) -> str:
    if get_origin(base) is tuple:
        return f"at most {meta.max_length} entries"
    number = {float: "a number", int: "an integer", bool: "true or false"}[base]
    low = f" above {meta.gt:g}" if meta.gt is not None else f" of at least {meta.ge:g}" if meta.ge is not None else ""
    least = (meta.extra or {}).get("least_positive")
    if least:
        number, low = f"0, or {number}", f" of at least {least:g}"
    return f"{number}{low}" + (f" and at most {meta.le:g}" if meta.le is not None else "")


PARAMETERS: dict[str, SamplingParameter] = {
    name: _parameter(name, annotation)
    for name, annotation in get_type_hints(Sampling, include_extras=True).items()
    if name in Sampling.__struct_fields__
}


def excludes_tokens(sampling: Sampling) -> bool:
    """Whether some tokens cannot be sampled at some positions, whatever their logits."""
    return bool(sampling.min_tokens or sampling.allowed_token_ids or sampling.bad_words)


def below_least_positive(sampling: Sampling) -> str | None:
    """Return the name of a parameter that is above 0 and below its lowest positive value; None if there is none."""
    for name, parameter in PARAMETERS.items():
        if parameter.least_positive and 0.0 < getattr(sampling, name) < parameter.least_positive:
            return name
    return None


def in_use(sampling: Sampling, **row: str) -> list[str]:
    """Return the names of parameters that differ from their neutral value and match `row` (field of a row = value)."""
    return [
        name
        for name, parameter in PARAMETERS.items()
        if getattr(sampling, name) != parameter.neutral and all(getattr(parameter, f) == v for f, v in row.items())
    ]


def restricts_support(sampling: Sampling) -> bool:
    """Whether tokens are sampled from a subset of the vocabulary, which has to be recorded for the learner."""
    return bool(in_use(sampling, learner="replays support"))


def truncates(sampling: Sampling, vocabulary: int) -> bool:
    """Whether filters can exclude tokens. False for greedy rows, which report the unfiltered distribution."""
    filtered = sampling.top_p < 1.0 or sampling.min_p > 0.0 or 0 < sampling.top_k < vocabulary
    return filtered and sampling.temperature != 0.0


def can_record_support(sampling: Sampling) -> bool:
    """Whether top-k limits the support to a size that is recorded."""
    return 1 <= sampling.top_k <= MAX_SUPPORT


class SampleRequest(Struct, frozen=True, kw_only=True):
    """Client -> decode engine: `len(seeds)` completions of one prompt, whose prefill is computed once and shared.

    seeds: one 64-bit seed per completion. Completion i is a function of (weights, prompt, sampling, seeds[i]).
    stream: report every token when it is sampled, in addition to the finished completions.
    reuse_prefix: read the prompt's KV cache from the prefix cache and store it there.
    record_support: report which tokens could have been sampled at each position (`Completion.supports`) if top-p, top-k
        or min-p exclude any; requires 1 <= top_k <= MAX_SUPPORT.
    record_routes: report which experts computed each token (`Completion.routes`); without effect for models without
        experts.
    background: nobody waits for the first token, as with rollouts; other requests are started first.
    weights: what samples: `POLICY`, `BASE`, or an adapter's name. request_id: name for aborts; empty if it has none.
    constraint: grammar of every completion, unless `max_tokens` ends it early; log-probabilities are constrained too.
    special_tokens: the text includes special tokens. include_stop: the text includes the stop string or stop token.
    client: who sends the request; requests are admitted fairly between clients. wait_seconds: maximum time until the
        admission, after which the request fails. answer_seconds: maximum time from the admission, after which its
        completions end with the finish reason `length`. 0: no limit.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    stream: bool = False
    reuse_prefix: bool = False
    record_support: bool = False
    record_routes: bool = False
    background: bool = False
    weights: str = POLICY
    request_id: str = ""
    constraint: Constraint | None = None
    special_tokens: bool = False
    include_stop: bool = False
    client: str = ""
    wait_seconds: float = 0.0
    answer_seconds: float = 0.0

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens that the request computes: the prompt once, and every completion."""
        return len(self.prompt) + len(self.seeds) * self.sampling.max_tokens


class CompletionTurn(Struct, frozen=True, kw_only=True):
    """A part of a completion that the policy sampled or an environment inserted.

    characters: of the text. tools: names of the tools that it calls.
    """

    sampled: bool
    tokens: int
    characters: int
    tools: tuple[str, ...] = ()


class ExpertRoutes(Struct, frozen=True, kw_only=True):
    """The experts of every token of a prompt and its completion but the last, which is not computed.

    experts: their numbers, tokens x layers x per_token, as bytes, or as little-endian uint16 if a layer has more than
    256 experts. layers: number of layers with experts. number_bytes: bytes per number.
    """

    experts: bytes
    layers: int
    per_token: int
    number_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of the route of one token."""
        return self.layers * self.per_token * self.number_bytes


def grown_routes(before: ExpertRoutes | None, now: ExpertRoutes | None) -> ExpertRoutes | None:
    """Return the routes of a row of turns after its last turn: of each token, those that first computed it.

    before: routes of the earlier turns; None if they have none. now: of the last turn and all that is before it.
    """
    if before is None or now is None:
        return now
    return structs.replace(now, experts=before.experts + now.experts[len(before.experts) :])


class Completion(Struct, frozen=True, kw_only=True):
    """One finished completion.

    tokens: without the prompt; includes the end token if one was sampled.
    logprobs: natural logarithm of each token's probability under the distribution it was sampled from, one per token.
    versions: policy version that sampled each token, one per token. Never decreases, unless an environment joins turns
        that were sampled out of order.
    sampled: whether the policy sampled each token; empty if it sampled all. Tokens that an environment inserted (the
        answer of a tool, the next question) are context and are not trained on: their log-probability is 0, their
        version is that of the previous token.
    turns: the parts in order, if an environment inserted some; empty if the policy sampled all (`turns_of`).
    text: the decoded completion, without end token, special tokens and stop string.
    stop_reason: the stop string or stop token that ended the completion, if any.
    top_logprobs: per token, up to `Sampling.top_logprobs` pairs (token, log-probability), most probable first.
    supports: per token, the tokens that could have been sampled, as little-endian uint32 in ascending order; empty if
        they were not requested or the support is the whole vocabulary.
    routes: which experts computed the tokens; None if that was not requested, or the model has no experts.
    weights: what sampled: `POLICY`, `BASE` or the name of an adapter; `versions` are then those of the adapter.
    fingerprint: of the adapter that sampled; empty for the policy, whose version names its weights.
    reward: of the environment that the completion acted in; None if there was none, or it gave none.
    advantages: of each token, if the environment gave rewards of turns and they are used; empty otherwise.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    supports: tuple[bytes, ...] = ()
    routes: ExpertRoutes | None = None
    sampled: tuple[bool, ...] = ()
    turns: tuple[CompletionTurn, ...] = ()
    weights: str = POLICY
    fingerprint: str = ""
    reward: float | None = None
    advantages: tuple[float, ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.sampled) if self.sampled else len(self.tokens)

    def __post_init__(self) -> None:
        """Raise ValueError if fields with one entry per token differ in length."""
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError("tokens, logprobs and versions of a completion must have equal length")
        if self.sampled and len(self.sampled) != len(self.tokens):
            raise ValueError(f"a completion of {len(self.tokens)} tokens has {len(self.sampled)} entries in `sampled`")
        if self.supports and len(self.supports) != len(self.tokens):
            raise ValueError(f"a completion of {len(self.tokens)} tokens has {len(self.supports)} supports")


def turns_of(
    tokens: Sequence[int], sampled: Sequence[bool], text: str, decode: Callable[[Sequence[int]], str]
) -> tuple[CompletionTurn, ...]:
    """Return the parts of a completion; empty if the policy sampled all. text: the decoded tokens.

    decode: of a part. What it removes at the start of a part, such as a space, belongs to the part before.
    """
    if all(sampled):
        return ()
    parts = [(by_policy, len(list(same))) for by_policy, same in groupby(sampled)]
    starts, at = list[int](), 0
    for first, last in pairwise([0, *accumulate(length for _, length in parts)]):
        part = decode(tokens[first:last])
        starts.append(min(max(at, text.find(part, at)), len(text)))
        at = starts[-1] + len(part)
    lengths = [end - start for start, end in pairwise([0, *starts[1:], len(text)])]
    return tuple(
        CompletionTurn(sampled=by_policy, tokens=tokens, characters=characters)
        for (by_policy, tokens), characters in zip(parts, lengths, strict=True)
    )


class TokenSampled(Struct, frozen=True, kw_only=True, tag=True):
    """Decode engine -> client, only if `SampleRequest.stream`: the next token of completion `index`.

    text: text that is final with this token. Text that may become part of a stop string or of a multi-byte character is
        held back until the next event.
    """

    index: int
    token: int
    logprob: float
    version: int
    text: str
    top_logprobs: tuple[tuple[int, float], ...] = ()


class CompletionDone(Struct, frozen=True, kw_only=True, tag=True):
    """Decode engine -> client: completion `index` is finished. tail: text that no `TokenSampled.text` contained."""

    index: int
    completion: Completion
    tail: str = ""


class SampleFailed(Struct, frozen=True, kw_only=True, tag=True):
    """Decode engine -> client: the request failed. param: the field that is the cause; empty if no field is."""

    reason: str
    param: str = ""


SampleEvent = TokenSampled | CompletionDone | SampleFailed


class PromptLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of given tokens under the policy at temperature 1, without filters.

    version: policy version that computed them. logprobs: natural logarithms, one for each token except the first.
    top_logprobs: at the same positions, the most probable (token, log-probability) pairs, best first. entropies: of the
    distributions at these positions, in nats.
    """

    version: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    entropies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError if the fields differ in length."""
        if len(self.logprobs) != len(self.top_logprobs):
            raise ValueError(f"{len(self.logprobs)} logprobs of a prompt have {len(self.top_logprobs)} top_logprobs")


def derive(seed: int, *path: int | str) -> int:
    """A 64-bit seed derived from `seed` and `path`: the first 8 bytes of BLAKE2b over `seed/path[0]/path[1]/...`."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def completion_seeds(seed: int, count: int) -> tuple[int, ...]:
    """One seed per completion of a group."""
    return tuple(derive(seed, "completion", index) for index in range(count))
