"""The checks of completions that another process has sampled.

Native code indexes arrays with the tokens, without checks of its own: no token reaches it that is not in the
vocabulary. Their log-probabilities are compared with the learner's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from attachments.remote.messages import RolloutAnswer
from attachments.remote.server import RemoteFailure
from protocols.sampling import (
    MAX_LOGPROB,
    MAX_SUPPORT,
    MIN_LOGPROB,
    POLICY,
    Completion,
    SampleRequest,
    Sampling,
    completion_seeds,
    truncates,
)
from protocols.step import StepReport, TrainedGroup

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens, without special tokens."""


def check_answer(answer: RolloutAnswer, request: SampleRequest, *, vocab_size: int, decode: Decode) -> None:
    """Raise RemoteFailure if the data cannot be the completions of a request to the policy."""
    if len(answer.completions) != len(request.seeds):
        raise RemoteFailure(f"returned {len(answer.completions)} completions for {len(request.seeds)} seeds")
    for completion in answer.completions:
        _check_tokens(completion, request.sampling, vocab_size)
        _check_logprobs(completion)
        _check_versions(completion, answer.fingerprints)
        _check_ending(completion, request.sampling)
        _check_alternatives(completion, request.sampling, vocab_size)
        _check_supports(completion, request, vocab_size)
        if not request.special_tokens:
            _check_text(completion, request, decode)


def _check_tokens(completion: Completion, sampling: Sampling, vocab_size: int) -> None:
    count, limit = len(completion.tokens), sampling.max_tokens
    if not 1 <= count <= limit:
        raise RemoteFailure(f"returned a completion of {count} tokens; at least 1, at most {limit}")
    for token in completion.tokens:
        _check_token(token, vocab_size)
    if completion.sampled:
        raise RemoteFailure("returned tokens that it did not sample")
    if completion.routes is not None:
        raise RemoteFailure("returned routes, which were not requested")
    if completion.weights != POLICY or completion.fingerprint:
        raise RemoteFailure("sampled with an adapter, not with the policy")


def _check_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise RemoteFailure(f"returned token {token}, which is not in the vocabulary of {vocab_size}")


def _check_logprobs(completion: Completion) -> None:
    for logprob in completion.logprobs:
        if not MIN_LOGPROB <= logprob <= MAX_LOGPROB:
            raise RemoteFailure(f"returned log-probability {logprob:g}; at least {MIN_LOGPROB:g}, at most 0")


def _check_versions(completion: Completion, fingerprints: Mapping[int, str]) -> None:
    if missing := {version for version in completion.versions if version not in fingerprints}:
        raise RemoteFailure(f"returned no fingerprint of version {min(missing)}")
    if any(later < earlier for earlier, later in pairwise(completion.versions)):
        raise RemoteFailure("returned tokens of an older version after tokens of a newer one")


def _check_ending(completion: Completion, sampling: Sampling) -> None:
    if completion.stop_reason not in (None, completion.tokens[-1], *sampling.stop):
        raise RemoteFailure("returned a stop reason that the request does not have")


def _check_text(completion: Completion, request: SampleRequest, decode: Decode) -> None:
    """Require the text of the tokens, without the stop string and what follows it, because rewards read it.

    Decoders differ in white space and in incomplete characters, which are not compared.
    """
    text, whole = _comparable(completion.text), _comparable(decode(completion.tokens))
    stop = completion.stop_reason
    if isinstance(stop, str):
        stop = _comparable(stop)
        possible = whole.startswith(text if request.include_stop and text.endswith(stop) else text + stop)
    else:
        ended = completion.finish_reason == "stop" and text == _comparable(decode(completion.tokens[:-1]))
        possible = ended or text == whole
    if not possible:
        raise RemoteFailure("returned a text that is not that of its tokens: start it with the tokenizer of this run")


def _comparable(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())


def _check_alternatives(completion: Completion, sampling: Sampling, vocab_size: int) -> None:
    """The alternatives of a position may be fewer than requested, because filters exclude tokens."""
    if len(completion.top_logprobs) not in ((0, len(completion.tokens)) if sampling.top_logprobs else (0,)):
        raise RemoteFailure(f"returned {len(completion.top_logprobs)} rows of top_logprobs")
    for row in completion.top_logprobs:
        if len(row) > sampling.top_logprobs:
            raise RemoteFailure(f"returned {len(row)} top_logprobs; at most {sampling.top_logprobs}")
        for token, logprob in row:
            _check_token(token, vocab_size)
            if not logprob <= MAX_LOGPROB:
                raise RemoteFailure(f"returned log-probability {logprob:g} in top_logprobs; at most 0")


def _check_supports(completion: Completion, request: SampleRequest, vocab_size: int) -> None:
    """Require the support of every token exactly where it was requested, and in it the sampled token."""
    expected = len(completion.tokens) if request.record_support and truncates(request.sampling, vocab_size) else 0
    supports = completion.supports
    if len(supports) != expected:
        raise RemoteFailure(f"returned {len(supports)} supports for {expected} tokens with a support")
    if not expected:
        return
    if any(len(support) % 4 or not 4 <= len(support) <= 4 * MAX_SUPPORT for support in supports):
        raise RemoteFailure(f"returned a support that is not 1 to {MAX_SUPPORT} tokens")
    count_T = np.array([len(support) // 4 for support in supports])
    token_N = np.frombuffer(b"".join(supports), dtype="<u4").astype(np.int64)
    start_T = np.cumsum(count_T) - count_T
    ascends_N = np.diff(token_N, prepend=-1) > 0
    ascends_N[start_T] = True
    if not ascends_N.all():
        raise RemoteFailure("returned a support whose tokens do not ascend")
    _check_token(int(token_N.max()), vocab_size)
    sampled_N = np.repeat(completion.tokens, count_T)
    if not np.logical_or.reduceat(token_N == sampled_N, start_T).all():
        raise RemoteFailure("returned a support without the sampled token")


MAX_GROUPS = 16_384
"""Number of groups whose servers are remembered."""


class ServerComparison:
    """Remembers which server sampled which group, and compares log-probabilities on the tokens of an update.

    An update computes the log-probabilities of all tokens that it trains on, so the comparison needs no forward pass.
    The weights may differ by the staleness of a group, and by dropout. A large difference is therefore a reason for a
    probe, which compares equal weights, and not a proof.
    """

    def __init__(self) -> None:
        self._servers: dict[int, str] = {}

    def sampled(self, request: SampleRequest, server: str) -> None:
        """Remember the name of the server that sampled a group."""
        self._servers[request.seeds[0]] = server
        if len(self._servers) > MAX_GROUPS:
            del self._servers[next(iter(self._servers))]

    def differences(self, report: StepReport) -> dict[str, float]:
        """Return the largest mean difference of a group of each server, in nats per token."""
        found: dict[str, float] = {}
        for group in () if report.rolled_back else report.trained:
            server = self._servers.pop(completion_seeds(group.scored.group.prompt.seed, 1)[0], None)
            if server is not None:
                found[server] = max(found.get(server, 0.0), _difference(group))
        return found


def _difference(group: TrainedGroup) -> float:
    """Return the mean of |learner - sampler| over the tokens that were trained on; 0 without any; infinity for NaN."""
    total, count = 0.0, 0
    for completion, values in zip(group.scored.group.completions, group.tokens, strict=False):
        learner_T = np.frombuffer(values.learner_logprob, dtype="<f4").astype(np.float64)
        trained_T = ~np.isnan(learner_T)
        total += float(np.abs(learner_T - np.asarray(completion.logprobs))[trained_T].sum())
        count += int(trained_T.sum())
    return (total / count if math.isfinite(total) else math.inf) if count else 0.0
