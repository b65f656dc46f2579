"""Success rates of problems: a Beta posterior per problem, with a prior from the problems of the same type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocols.curriculum import TypeEvidence

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

MIN_EVIDENCE = 0.01
"""Number of completions below which the evidence on a problem is dropped."""

PRIOR_GROUPS = 1.25
"""Weight, in groups, of the prior mean 1/2 of a type; the mean of a new type then has the variance 1/12 (uniform)."""

PRIOR_CORRELATION, PRIOR_CORRELATION_GROUPS = 1 / 3, 4.0
"""Prior of the correlation inside a type, and its weight in groups. 1/3 is that of Beta(1, 1)."""

CORRELATION_RANGE = (0.01, 0.95)
MIN_STRENGTH = 0.5
"""Smallest strength (alpha + beta) of a prior."""

_log_gamma = np.frompyfunc(math.lgamma, 1, 1)


class Posterior(NamedTuple):
    """Parameters of the Beta posterior of each of N problems."""

    alpha_N: Floats
    beta_N: Floats

    @property
    def mean_N(self) -> Floats:
        """Expected success rates."""
        mean_N: Floats = self.alpha_N / (self.alpha_N + self.beta_N)
        return mean_N

    def expectation(self, successes: float, failures: float) -> Floats:
        """E[p^successes (1 - p)^failures] = B(alpha + successes, beta + failures) / B(alpha, beta)."""
        raised = _log_beta(self.alpha_N + successes, self.beta_N + failures)
        result: Floats = np.exp(raised - _log_beta(self.alpha_N, self.beta_N))
        return result

    def zero_variance(self, group_size: int) -> Floats:
        """Probability that all or none of `group_size` completions succeed: E[p^n + (1 - p)^n]."""
        return self.expectation(group_size, 0) + self.expectation(0, group_size)


class SuccessRates:
    """The evidence on every problem and type, and the posterior that follows from it.

    The success rate p_i of problem i of type k has the prior Beta(c m, c (1 - m)). m is the mean success rate of the
    type, and the strength c matches the variance of success rates inside the type plus the uncertainty of m. With s_i
    successes and f_i failures, the posterior is Beta(c m + s_i, c (1 - m) + f_i). The prior is estimated from the
    groups of the type (empirical Bayes): W is their weight, x the mean of s / n, y that of s (s - 1) / (n (n - 1)).

        m   = (W x + w / 2) / (W + w)                                  w = PRIOR_GROUPS
        rho = (R / 3 + W (y - x^2) / (m (1 - m))) / (R + W)            R = PRIOR_CORRELATION_GROUPS
        c   = 1 / (rho + (rho + (1 - rho) / n) / (W + w)) - 1

    rho is the correlation of two completions of one problem, beyond the mean of the type: 0 if all problems of the
    type have the same success rate, 1 if each is always or never solved. y - x^2 estimates rho m (1 - m).

    A group counts towards its type with the share c / (c + s_i + f_i) that the prior had in its own prediction: groups
    of a problem that is chosen again and again say little about other problems.

    The policy changes, so evidence is forgotten: after every step it is multiplied by 2^(-1 / half_life).
    """

    def __init__(self, types: Sequence[str], *, group_size: int, half_life: float) -> None:
        """types: type of each problem. group_size: number of completions per group. half_life: in steps."""
        self._names = tuple(dict.fromkeys(types))
        position = {name: index for index, name in enumerate(self._names)}
        self._type_N: Indices = np.array([position[name] for name in types], dtype=np.int64)
        self._group_size, self._decay = group_size, 2.0 ** (-1.0 / half_life)
        self._successes_N, self._failures_N = np.zeros(len(types)), np.zeros(len(types))
        self._evidence = np.zeros((3, len(self._names)))  # groups, rates, pairs

    def posterior(self, problems: Indices | slice = slice(None)) -> Posterior:
        """The posterior of some problems, by default of all."""
        mean, strength = self._priors()
        kinds = self._type_N[problems]
        prior_N = mean[kinds] * strength[kinds]
        return Posterior(
            prior_N + self._successes_N[problems],
            strength[kinds] - prior_N + self._failures_N[problems],
        )

    def add(self, problem: int, *, successes: int, completions: int) -> None:
        """Add the evidence of one group."""
        kind = self._type_N[problem]
        strength = self._priors()[1][kind]
        weight = strength / (strength + self._successes_N[problem] + self._failures_N[problem])
        pairs = max(1, completions * (completions - 1))
        both = successes * (successes - 1) / pairs
        self._evidence[:, kind] += weight * np.array([1.0, successes / completions, both])
        self._successes_N[problem] += successes
        self._failures_N[problem] += completions - successes

    def forget(self) -> None:
        """Reduce the weight of all evidence by one step; a problem with almost none becomes unknown."""
        for counts in (self._successes_N, self._failures_N, self._evidence):
            counts *= self._decay
        unknown = self._successes_N + self._failures_N < MIN_EVIDENCE
        self._successes_N[unknown] = self._failures_N[unknown] = 0.0

    def counts(self) -> tuple[Indices, Floats, Floats]:
        """The problems with evidence, ascending, and their numbers of successes and failures."""
        known = np.flatnonzero(self._successes_N + self._failures_N).astype(np.int64)
        return known, self._successes_N[known], self._failures_N[known]

    def types(self) -> dict[str, TypeEvidence]:
        """The evidence on every type."""
        rows = zip(self._names, self._evidence.T.tolist(), strict=True)
        return {name: TypeEvidence(groups=row[0], rates=row[1], pairs=row[2]) for name, row in rows}

    def restore(self, problems: Indices, successes: Floats, failures: Floats, types: dict[str, TypeEvidence]) -> None:
        """Replace all evidence by that of `counts` and `types`."""
        self._successes_N[:], self._failures_N[:], self._evidence[:] = 0.0, 0.0, 0.0
        self._successes_N[problems], self._failures_N[problems] = successes, failures
        for index, name in enumerate(self._names):
            if name in types:
                self._evidence[:, index] = types[name].groups, types[name].rates, types[name].pairs

    def _priors(self) -> tuple[Floats, Floats]:
        """Mean and strength of the prior of each type."""
        groups, rates, pairs = self._evidence
        mean: Floats = (rates + PRIOR_GROUPS / 2) / (groups + PRIOR_GROUPS)
        spread = mean * (1 - mean)
        own = np.divide(rates, groups, out=np.zeros_like(rates), where=groups > 0)
        between = (pairs - groups * own**2) / spread
        correlation = (PRIOR_CORRELATION * PRIOR_CORRELATION_GROUPS + between) / (PRIOR_CORRELATION_GROUPS + groups)
        correlation = np.clip(correlation, *CORRELATION_RANGE)
        uncertainty = (correlation + (1 - correlation) / self._group_size) / (groups + PRIOR_GROUPS)
        strength: Floats = np.maximum(1 / (correlation + uncertainty) - 1, MIN_STRENGTH)
        return mean, strength


def _log_beta(a: Floats, b: Floats) -> Floats:
    result: Floats = np.asarray(_log_gamma(a) + _log_gamma(b) - _log_gamma(a + b), dtype=np.float64)
    return result
