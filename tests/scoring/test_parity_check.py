"""Sampler and learner agree about the same tokens."""

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
    """What would serve it, if it had a tokenizer."""
    policy.tokenizer = tiny_source().tokenizer
    return DecodeEngine(policy, EngineSection())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_cached_decoding_and_teacher_forcing_agree(temperature: float) -> None:
    """In float32 to 1e-4 nats, with a moved adapter, at any temperature; greedy counts as untempered."""
    policy = tiny_policy()
    moved = {name: value + 0.05 for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(moved), version=1, step=1, fingerprint="moved")
    report = check_parity(policy, engine_of(policy), (1, 2, 3), (4, 5, 6, 7, 8), temperature)
    assert report.tokens == 5
    assert 0.0 <= report.max_difference < 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_agree_on_every_kind_of_architecture(architecture: str) -> None:
    """Dense, sliding windows, experts, recurrent and hybrid; beyond the window of eight tokens where there is one."""
    source = tiny_source(architecture)
    policy = BigramPolicy(source.model, vocab_size=source.vocab_size)
    engine = DecodeEngine(source, EngineSection())
    report = check_parity(policy, engine, range(1, 13), (4, 5, 6, 7, 8, 9), 0.8)
    assert report.max_difference < 2e-4


class Doubles:
    """An engine whose logits are twice the model's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def teacher_forced_logits(self, prompt: Sequence[int], tokens: Sequence[int], *, rows: int) -> Iterator[mx.array]:
        """From the whole sequence before each token."""
        sequence = [*prompt, *tokens]
        for end in range(len(prompt), len(sequence)):
            yield self._model(mx.array([sequence[:end]] * rows))[:, -1] * 2.0


def test_an_engine_that_computes_something_else_is_seen() -> None:
    """The probe compares two computations, not one with itself."""
    policy = BigramPolicy(Bigram())
    report = check_parity(policy, Doubles(policy.model), (1, 2), (3, 4), 1.0)
    assert report.max_difference > 0.1


@pytest.mark.skipif(not computes_on_host(), reason="only the CPU backend decodes on the host")
def test_what_is_probed_is_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are taken on the host, it is these that are compared."""
    policy = tiny_policy()
    engine = engine_of(policy)
    true = HostDecoder.logits
    monkeypatch.setattr(HostDecoder, "logits", lambda *given: true(*given) * np.float32(2.0))
    assert check_parity(policy, engine, (1, 2, 3), (4, 5, 6), 1.0).max_difference > 1e-3


def test_running_rows_do_not_notice_a_probe() -> None:
    """They draw what they would have sampled without it."""
    source = tiny_source()
    engine = make_engine(source)
    answer = submit_request(engine, make_prompt(6), SAMPLED, (3,))
    tick_until(engine, lambda: engine.stats().tokens_sampled == 2)
    check_parity(BigramPolicy(source.model, vocab_size=source.vocab_size), engine, (1, 2, 3), (4, 5), 1.0)
    run(engine)
    assert answer.completions[0].tokens == complete_alone(source, make_prompt(6), SAMPLED, 3).tokens


def test_probabilities_that_are_not_numbers_are_reported_as_such() -> None:
    """NaN weights give a difference that no threshold accepts."""
    policy = tiny_policy()
    broken = {name: value * math.nan for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(broken), version=1, step=1, fingerprint="broken")
    assert not math.isfinite(check_parity(policy, engine_of(policy), (1, 2), (3, 4), 1.0).max_difference)


@pytest.mark.parametrize(("prompt", "tokens"), [((), (1,)), ((1,), ())])
def test_a_probe_of_nothing_is_refused(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """There is no difference to take the maximum of."""
    policy = tiny_policy()
    engine = engine_of(policy)
    with pytest.raises(ValueError, match="at least one token"):
        check_parity(policy, engine, prompt, tokens, 1.0)
