"""A model of its own over chosen weights: what an engine samples from if it does not serve."""

from __future__ import annotations

import time

import mlx.nn as nn

from clotho.models.policy import Parameters, Policy
from clotho.models.tokenizer import ChatTokenizer


class PinnedWeights:
    """What an engine samples from if it does not serve: a model of its own, with the weights that `use` chooses."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy.copy_model()
        self.adapted, self.keeps_base = self._policy.adapted, policy.keeps_base
        self.version, self.step, self.fingerprint = policy.version, policy.step, policy.fingerprint
        self.model: nn.Module = self._policy.model
        self.tokenizer: ChatTokenizer = policy.tokenizer
        self.vocab_size = policy.vocab_size
        self.context_length = policy.context_length

    def use(self, parameters: Parameters, version: int) -> None:
        """Compute with these parameters from now on."""
        self._policy.use(parameters)
        self._policy.fold()
        self.version = version

    def publish(self, parameters: Parameters, *, version: int, step: int, fingerprint: str) -> float:
        """Compute with these parameters, which are evaluated, from now on; return the duration in seconds."""
        started = time.perf_counter()
        self.use(parameters, version)
        self.step, self.fingerprint = step, fingerprint
        return time.perf_counter() - started

    def served(self) -> tuple[Parameters, int]:
        """Return the parameters of the last `use`, and their version. Any thread may call this."""
        return self._policy.trainable(), self.version

    def release(self) -> None:
        """Refer to no parameters until the next `use`."""
        self._policy.release()
