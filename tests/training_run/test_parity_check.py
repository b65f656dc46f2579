"""The parity check: sampler and learner compute the same log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from clotho.inference.cache_layout import Logits
from clotho.inference.engine import DecodeEngine
from clotho.inference.rows import RouteArray
from clotho.models.attention import AttentionLayers
from clotho.models.parameters import flat, nested
from clotho.models.policy import Policy, TrainablePolicy
from clotho.models.turns import UNSHARED, TurnBudget
from clotho.scoring import teacher_forcing
from clotho.scoring.sequences import MicroBatch
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.engine import EngineSection
from clotho.training.update import PolicyLearner
from protocols.sampling import Sampling
from tests import model_lanes
from tests.inference.engine_helpers import (
    SAMPLED,
    complete_alone,
    make_engine,
    make_prompt,
    run,
    submit_request,
    tick_until,
)
from tests.learner_settings import learner_settings
from tests.recorded_turns import RecordedTurns
from tests.small_models import ARCHITECTURES, tiny_source
from tests.training.policies_and_groups import BigramPolicy, tiny_policy
from tests.training_run.checked_parity import checked
from training_run import parity_check
from training_run.forced_decoder import ForcedDecoder
from training_run.parity_check import (
    MAX_PROMPT,
    MAX_ROWS,
    SERVED_KL,
    ParityChecker,
    ParityModels,
    ParityReport,
    ParitySample,
    TeacherForcedDecoder,
    parity_sample,
)

Decoded = Generator[mx.array, None, Sequence[RouteArray]]


def check(
    policy: TrainablePolicy,
    decoder: TeacherForcedDecoder | DecodeEngine,
    prompt: Sequence[int],
    tokens: Sequence[int],
    temperature: float = 1.0,
    *,
    rows: int = 2,
    layout: str = "padded",
) -> ParityReport:
    """Check one completion."""
    return checked(
        policy, decoder, ParitySample(tuple(prompt), (tuple(tokens),)), temperature, rows=rows, layout=layout
    )


def engine_of(policy: Policy) -> DecodeEngine:
    """Return an engine of this policy without a tokenizer."""
    policy.tokenizer = tiny_source().tokenizer
    return DecodeEngine(policy, EngineSection())


def at_once(call: Callable[[], Any]) -> Future[Any]:
    """Run a call in this thread."""
    future: Future[Any] = Future()
    future.set_result(call())
    return future


@pytest.mark.lanes
@pytest.mark.parametrize("temperature", [0.5, 0.0])
def test_cached_decoding_equals_teacher_forcing(temperature: float) -> None:
    """To 1e-4 nats in float32, with a changed adapter, at any temperature. Greedy counts as temperature 1."""
    policy = tiny_policy()
    moved = {name: value + 0.05 for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(moved), version=1, step=1, fingerprint="moved")
    report = check(policy, engine_of(policy), (1, 2, 3), (4, 5, 6, 7, 8), temperature)
    assert report.tokens == 5
    assert 0.0 <= report.max_difference < 1e-4
    assert 0.0 <= report.mean_kl < 1e-9
    assert report.served_kl == 0.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_passes_the_parity_check(architecture: str) -> None:
    """Dense, sliding window, mixture of experts, recurrent and hybrid, beyond the window of eight tokens."""
    source = tiny_source(architecture)
    policy = BigramPolicy(source.model, vocab_size=source.vocab_size)
    engine = DecodeEngine(source, EngineSection())
    report = check(policy, engine, range(1, 13), (4, 5, 6, 7, 8, 9), 0.8)
    assert report.max_difference < model_lanes.atol(2e-4)


def test_turns_of_limited_length_change_nothing() -> None:
    """The learner's computation is divided between blocks, and what is served stays what it was."""
    policy = tiny_policy()
    moved = nested({name: value + 0.05 for name, value in flat(policy.trainable()).items()})
    engine = engine_of(policy)
    sample = ParitySample((1, 2, 3), ((4, 5, 6, 7), (8, 9, 10, 11)))
    logits = model_lanes.numpy(policy.model(mx.array([[1, 2, 3]])))

    def between(number: int) -> None:
        assert model_lanes.numpy(policy.model(mx.array([[1, 2, 3]]))).tobytes() == logits.tobytes()
        assert not policy.model.training

    reports, pauses = [], []
    for seconds in (0.0, 1e-12):
        lane = RecordedTurns(between)
        turns = TurnBudget(seconds, lane)
        reports.append(checked(policy, engine, sample, rows=2, layout="auto", parameters=moved, turns=turns))
        pauses.append(lane.pauses)
    assert reports[0] == reports[1]
    assert reports[0].mean_kl > 0.0
    assert pauses[1] - pauses[0] >= len(policy.model.layers)


class DoubledLogits:
    """An engine with doubled logits."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def teacher_forced_logits(
        self, prompt: Sequence[int], completions: Sequence[Sequence[int]], *, rows: int
    ) -> Decoded:
        """From the whole sequence before each token."""
        (tokens,) = completions
        sequence = [*prompt, *tokens]
        for end in range(len(prompt), len(sequence)):
            yield self._model(mx.array([sequence[:end]] * rows))[:, -1] * 2.0
        return ()


def test_an_engine_with_other_logits_fails_the_parity_check() -> None:
    """The check compares two independent computations: KL(served || learner), in float64, at the temperature."""
    policy = tiny_policy()
    report = check(policy, DoubledLogits(policy.model), (1, 2), (3, 4), 0.5)
    z_T_V = np.array(model_lanes.numpy(policy.model(mx.array([[1, 2, 3]]))), dtype=np.float64)[0, 1:] / 0.5
    served_T_V, learner_T_V = (z_T_V * k - np.log(np.exp(z_T_V * k).sum(axis=-1, keepdims=True)) for k in (2.0, 1.0))
    difference_T_V = served_T_V - learner_T_V
    assert report.max_difference == pytest.approx(np.abs(difference_T_V[[0, 1], [3, 4]]).max(), rel=1e-2)
    assert report.mean_kl == pytest.approx((np.exp(served_T_V) * difference_T_V).sum(axis=-1).mean(), rel=1e-2)


def test_the_checks_of_a_run_compare_with_the_layout_of_its_learner() -> None:
    """And replay routes unless the learner never does."""
    policy = tiny_policy()
    learner = learner_settings(layout="shared", router_replay="off")
    checker = ParityChecker(
        policy, engine_of(policy), settings=EngineSection(), learner=learner, decode=cast(Any, None), lane=UNSHARED
    )
    assert (checker._models.forcing.layout, checker._models.replays) == ("shared", False)


def test_the_layout_of_the_learner_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity checks take it over, with the result of "auto", and compare as before."""
    policy, model = tiny_policy(), tiny_policy()
    engine, sample = engine_of(policy), ParitySample((1, 2, 3), ((4, 5, 6), (7, 8, 9)))
    learner = PolicyLearner(model, learner_settings(layout="auto"), Sampling(), steps=1)
    assert learner.forcing.layout == "auto"

    def refused(*_: Any, **__: Any) -> AttentionLayers:
        raise AssertionError("a second check")

    monkeypatch.setattr(teacher_forcing, "check_layout", refused)
    checker = ParityChecker(
        policy,
        engine,
        settings=EngineSection(),
        learner=learner_settings(layout="auto"),
        decode=at_once,
        lane=UNSHARED,
        forcing=learner.forcing,
    )
    report = checker.check(sample, policy.trainable(), temperature=1.0)
    assert checker._models.forcing.layout == "auto"
    assert report.max_difference < 1e-4


def test_the_difference_of_a_check_is_the_largest_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its divergence is the mean."""
    measured = np.array([0.5, 2.0]), np.array([3.0, 7.0])
    monkeypatch.setattr(parity_check, "_differences", lambda *_: measured)
    policy = tiny_policy()
    report = check(policy, DoubledLogits(policy.model), (1, 2), (3, 4), 1.0)
    assert (report.mean_kl, report.max_difference) == (1.25, 7.0)


def test_the_check_uses_the_computation_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a backend decodes instead of the model."""
    policy = tiny_policy()
    engine = engine_of(policy)
    caches = type(engine.make_caches(1))
    true = caches.parts

    def doubled(*given: Any, **options: Any) -> Generator[None, None, Logits]:
        logits_B_V = yield from true(*given, **options)
        return logits_B_V * 2

    monkeypatch.setattr(caches, "parts", doubled)
    assert check(policy, engine, (1, 2, 3), (4, 5, 6), 1.0).max_difference > 1e-3


def test_running_rows_are_unaffected_by_the_check() -> None:
    """They sample the same tokens as without it."""
    source = tiny_source()
    engine = make_engine(source)
    answer = submit_request(engine, make_prompt(6), SAMPLED, (3,))
    tick_until(engine, lambda: engine.stats().tokens_sampled == 2)
    check(BigramPolicy(source.model, vocab_size=source.vocab_size), engine, (1, 2, 3), (4, 5), 1.0)
    run(engine)
    assert answer.completions[0].tokens == complete_alone(source, make_prompt(6), SAMPLED, 3).tokens


def test_nan_weights_give_a_nan_difference() -> None:
    """No threshold accepts NaN."""
    policy = tiny_policy()
    broken = {name: value * math.nan for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(broken), version=1, step=1, fingerprint="broken")
    assert not math.isfinite(check(policy, engine_of(policy), (1, 2), (3, 4), 1.0).max_difference)


@pytest.mark.parametrize(("prompt", "tokens"), [((), (1,)), ((1,), ())])
def test_a_check_of_zero_tokens_is_refused(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """The maximum of no differences is undefined."""
    policy = tiny_policy()
    engine = engine_of(policy)
    with pytest.raises(ValueError, match="at least one token"):
        check(policy, engine, prompt, tokens, 1.0)


@pytest.mark.parametrize(("rows", "expected"), [(1, 3), (13, 13), (200, MAX_ROWS)])
def test_decode_steps_have_the_rows_of_the_running_batch(
    rows: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrix kernels depend on the number of rows. Completions fill the rows repeatedly."""
    policy = tiny_policy()
    decoder, shapes = ForcedDecoder.of_engine(engine_of(policy)), []
    decode = decoder.teacher_forced_logits

    def recorded(*given: Any, **options: Any) -> Iterator[mx.array]:
        for logits_R_V in decode(*given, **options):
            shapes.append(logits_R_V.shape[0])
            yield logits_R_V

    monkeypatch.setattr(decoder, "teacher_forced_logits", recorded)
    sample = ParitySample((1, 2, 3), ((4, 5), (6, 7), (8, 9)))
    report = checked(policy, decoder, sample, rows=rows, layout="shared")
    assert (report.rows, report.tokens, set(shapes)) == (expected, 6, {expected})
    assert report.max_difference < 1e-4


@pytest.mark.parametrize(("tokens", "rows"), [(4, 4), (1, 2), (32, 16)])
def test_a_check_of_few_tokens_has_few_rows(tokens: int, rows: int) -> None:
    """At most `parity.tokens`, but one per completion; nothing runs, so the engine could decode 16 rows."""
    policy = tiny_policy()
    engine, settings = engine_of(policy), EngineSection(max_num_seqs=16)
    checker = ParityChecker(
        policy, engine, settings=settings, learner=learner_settings(), decode=at_once, lane=UNSHARED
    )
    sample = ParitySample((1, 2, 3), ((4, 5), (6, 7)))
    assert checker.check(sample, policy.trainable(), temperature=1.0, tokens=tokens).rows == rows


def test_the_prompt_of_a_check_is_bounded() -> None:
    """Of a long prompt, only the last tokens are used, so that a check does not delay requests."""
    policy = tiny_policy()
    prompts = list[tuple[int, ...]]()
    decode = ForcedDecoder.of_engine(engine_of(policy)).teacher_forced_logits

    class Recording:
        def teacher_forced_logits(self, prompt: Sequence[int], *given: Any, **options: Any) -> Decoded:
            prompts.append(tuple(prompt))
            return decode(prompt, *given, **options)

    prompt = tuple(range(1, 31)) * 4
    assert check(policy, Recording(), prompt, (3, 4)).max_difference < 1e-4
    assert set(prompts) == {prompt[-MAX_PROMPT:]}


def test_a_check_pauses_after_every_decode_step() -> None:
    """Those of the served decoder, and those of its own."""
    policy, lane = tiny_policy(), RecordedTurns()
    sample = ParitySample((1, 2, 3), ((4, 5, 6), (7, 8, 9)))
    checked(policy, engine_of(policy), sample, rows=2, layout="auto", turns=TurnBudget(0.0, lane))
    assert lane.pauses >= 2 * 3


def test_the_model_of_a_check_has_the_parameters_and_no_tracer_afterwards() -> None:
    """Also if the learner's computation fails, so that the next check computes with its own weights."""
    policy = tiny_policy()
    model, served = policy.copy_model(), ForcedDecoder.of_engine(engine_of(policy))
    decoder, forcing = ForcedDecoder.of_model(model.model, EngineSection()), FailingOnce(model.model, model.vocab_size)
    moved = nested({name: value + 0.05 for name, value in flat(policy.trainable()).items()})

    def check_once() -> ParityReport:
        sample = ParitySample((1, 2, 3), ((4, 5, 6),))
        return ParityModels(served, model, decoder, forcing).check(sample, moved, temperature=1.0, rows=2)

    with pytest.raises(RuntimeError, match="fails once"):
        check_once()
    for _ in range(2):
        used = flat(model.model.trainable_parameters())
        assert all(used[name] is array for name, array in flat(moved).items())
        assert not model.model.training
        report = check_once()
    policy.publish(moved, version=1, step=1, fingerprint="moved")
    assert check_once().served_kl == 0.0 < report.served_kl


class FailingOnce(TeacherForcing):
    """Teacher forcing whose first forward pass fails."""

    failed = False

    def logits(self, micro: MicroBatch) -> tuple[mx.array, mx.array | None]:
        if not self.failed:
            self.failed = True
            raise RuntimeError("fails once")
        return super().logits(micro)


def test_dropout_has_no_effect_on_a_check() -> None:
    """The learner's side is computed in training mode, but without dropout.

    In 16 bits, layers with dropout round otherwise: they compute LoRA in the order of mlx-lm.
    """
    policy = tiny_policy(dropout=0.5)
    moved = {name: value + 0.05 for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(moved), version=1, step=1, fingerprint="moved")
    assert check(policy, engine_of(policy), (1, 2, 3), (4, 5, 6)).mean_kl < model_lanes.atol(1e-4) / 10


class NoisyDecoder:
    """A decoder whose results differ between two executions."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._decoder = ForcedDecoder.of_engine(engine)

    def teacher_forced_logits(
        self, prompt: Sequence[int], completions: Sequence[Sequence[int]], *, rows: int
    ) -> Decoded:
        """Add noise to the logits of the engine."""
        for logits_R_V in self._decoder.teacher_forced_logits(prompt, completions, rows=rows):
            yield logits_R_V + 0.01 * mx.random.normal(logits_R_V.shape)
        return ()


def test_a_device_that_is_not_reproducible_passes() -> None:
    """Then equal weights do not give equal decode steps, and only the comparison with the learner remains."""
    policy = tiny_policy()
    report = check(policy, NoisyDecoder(engine_of(policy)), (1, 2, 3), (4, 5, 6))
    assert report.served_kl == 0.0
    assert report.mean_kl > SERVED_KL


@pytest.mark.parametrize(
    ("lengths", "count", "steps"),
    [([40] * 8, 8, 4), ([40], 1, 32), ([3] * 8, 8, 3), ([40, 40, 2, 2], 2, 16), ([40, 40, 11, 0], 3, 11), ([], 0, 0)],
)
def test_a_sample_has_enough_tokens_with_the_fewest_steps(lengths: list[int], count: int, steps: int) -> None:
    """32 tokens, if there are as many; short completions are left out if they would cost tokens."""
    sample = parity_sample((1, 2), [tuple(range(length)) for length in lengths], tokens=32)
    assert (len(sample.completions), sample.steps) == (count, steps)
    assert all(len(one) == steps for one in sample.completions)
