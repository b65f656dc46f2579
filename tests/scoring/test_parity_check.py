"""The parity check: sampler and learner compute the same log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from clotho.config.schema import EngineSection
from clotho.cpu import computes_on_host
from clotho.cpu.decoder import HostDecoder
from clotho.inference import DecodeEngine
from clotho.models.parameters import flat, nested
from clotho.models.policy import Policy
from clotho.scoring.teacher_forcing import check_parity
from tests.inference.engine_helpers import (
    SAMPLED,
    complete_alone,
    make_engine,
    make_prompt,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import ARCHITECTURES, tiny_source
from tests.training.policies_and_groups import Bigram, BigramPolicy, tiny_policy


def engine_of(policy: Policy) -> DecodeEngine:
    """Return an engine of this policy without a tokenizer."""
    policy.tokenizer = tiny_source().tokenizer
    return DecodeEngine(policy, EngineSection())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_cached_decoding_equals_teacher_forcing(temperature: float) -> None:
    """To 1e-4 nats in float32, with a changed adapter, at any temperature. Greedy counts as temperature 1."""
    policy = tiny_policy()
    moved = {name: value + 0.05 for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(moved), version=1, step=1, fingerprint="moved")
    report = check_parity(policy, engine_of(policy), (1, 2, 3), (4, 5, 6, 7, 8), temperature)
    assert report.tokens == 5
    assert 0.0 <= report.max_difference < 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_passes_the_parity_check(architecture: str) -> None:
    """Dense, sliding window, mixture of experts, recurrent and hybrid, beyond the window of eight tokens."""
    source = tiny_source(architecture)
    policy = BigramPolicy(source.model, vocab_size=source.vocab_size)
    engine = DecodeEngine(source, EngineSection())
    report = check_parity(policy, engine, range(1, 13), (4, 5, 6, 7, 8, 9), 0.8)
    assert report.max_difference < 2e-4


class DoubledLogits:
    """An engine with doubled logits."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def teacher_forced_logits(self, prompt: Sequence[int], tokens: Sequence[int], *, rows: int) -> Iterator[mx.array]:
        """From the whole sequence before each token."""
        sequence = [*prompt, *tokens]
        for end in range(len(prompt), len(sequence)):
            yield self._model(mx.array([sequence[:end]] * rows))[:, -1] * 2.0


def test_an_engine_with_other_logits_fails_the_parity_check() -> None:
    """The check compares two independent computations."""
    policy = BigramPolicy(Bigram())
    report = check_parity(policy, DoubledLogits(policy.model), (1, 2), (3, 4), 1.0)
    assert report.max_difference > 0.1


@pytest.mark.skipif(not computes_on_host(), reason="only the CPU backend decodes on the host")
def test_the_check_uses_the_computation_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """If decode steps run on the host, the check compares them."""
    policy = tiny_policy()
    engine = engine_of(policy)
    true = HostDecoder.logits
    monkeypatch.setattr(HostDecoder, "logits", lambda *given: true(*given) * np.float32(2.0))
    assert check_parity(policy, engine, (1, 2, 3), (4, 5, 6), 1.0).max_difference > 1e-3


def test_running_rows_are_unaffected_by_the_check() -> None:
    """They sample the same tokens as without it."""
    source = tiny_source()
    engine = make_engine(source)
    answer = submit_request(engine, make_prompt(6), SAMPLED, (3,))
    tick_until(engine, lambda: engine.stats().tokens_sampled == 2)
    check_parity(BigramPolicy(source.model, vocab_size=source.vocab_size), engine, (1, 2, 3), (4, 5), 1.0)
    run(engine)
    assert answer.completions[0].tokens == complete_alone(source, make_prompt(6), SAMPLED, 3).tokens


def test_nan_weights_give_a_nan_difference() -> None:
    """No threshold accepts NaN."""
    policy = tiny_policy()
    broken = {name: value * math.nan for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(broken), version=1, step=1, fingerprint="broken")
    assert not math.isfinite(check_parity(policy, engine_of(policy), (1, 2), (3, 4), 1.0).max_difference)


@pytest.mark.parametrize(("prompt", "tokens"), [((), (1,)), ((1,), ())])
def test_a_check_of_zero_tokens_is_refused(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """The maximum of no differences is undefined."""
    policy = tiny_policy()
    engine = engine_of(policy)
    with pytest.raises(ValueError, match="at least one token"):
        check_parity(policy, engine, prompt, tokens, 1.0)
