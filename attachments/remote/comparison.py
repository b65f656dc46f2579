"""Log-probabilities of servers against the learner's, on the tokens of an update.

An update computes the log-probabilities of all tokens that it trains on, so the comparison needs no forward pass. The
weights may differ by the staleness of a group, and by dropout. A large difference is therefore a reason for a probe,
which compares equal weights, and not a proof.
"""

from __future__ import annotations

import math

import numpy as np

from protocols.sampling import SampleRequest, completion_seeds
from protocols.step import StepReport, TrainedGroup

MAX_GROUPS = 16_384
"""Number of groups whose servers are remembered."""


class ServerComparison:
    """Remembers which server sampled which group, until the group is trained on."""

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
