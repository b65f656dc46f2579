"""Learner: one update and the same in two calls, losses, states, and the errors of a user."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import clotho
from protocols.errors import CheckpointError, ProfileError
from tests.library_policy import EMBEDDED, SAMPLING, data, groups, policy

RATE = 0.01


def learner(**settings: Any) -> clotho.Learner:
    """Return a new learner of the policy."""
    chosen: dict[str, Any] = {"learning_rate": RATE, "sampling": SAMPLING, "seed": 7, **settings}
    return clotho.Learner(policy(), **chosen)


@pytest.mark.parametrize(
    ("aggregation", "micro_batch_tokens"), [("sequence_mean", 64), ("token_mean", 4096), ("group_mean", 128)]
)
def test_an_update_and_the_same_data_in_two_calls_give_the_same_weights(
    aggregation: str, micro_batch_tokens: int
) -> None:
    """Bit for bit: the gradient, the step and the transaction are the same code."""
    settings = {
        "objective": {"type": "grpo", "loss_aggregation": aggregation, "clip_high": 0.28},
        "micro_batch_tokens": micro_batch_tokens,
        "kl_penalty": {"type": "loss", "coef": 0.1},
        "entropy_bonus": {"type": "fixed", "coef": 0.01},
    }
    one, two = learner(**settings), learner(**settings)
    for _ in range(2):
        update = one.update(groups())
        sequences = [
            clotho.Datum(prompt, completion, advantage)
            for (prompt, completions, _), advantages in zip(groups(), update.advantages, strict=True)
            for completion, advantage in zip(completions, advantages, strict=True)
        ]
        gradient = two.forward_backward(sequences)
        step = two.optim_step()
        assert update.applied
        assert step.applied
        assert one.fingerprint == two.fingerprint
        assert update.metrics == step.metrics
        assert gradient.loss == step.metrics.loss
    assert one.version == two.version == 2


def test_gradients_of_several_calls_add_up() -> None:
    """Two halves, each with half of the weight, are the whole."""
    aggregation = {"type": "reinforce", "loss_aggregation": "token_sum"}  # a mean over as many completions in each call
    whole, halves = learner(objective=aggregation), learner(objective=aggregation)
    whole.forward_backward(data())
    for part in (data()[:6], data()[6:]):
        halves.forward_backward([clotho.Datum(one.prompt, one.completion, one.advantages[0] / 2) for one in part])
    norms = whole.optim_step().metrics.grad_norm, halves.optim_step().metrics.grad_norm
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_step_without_a_gradient_changes_nothing() -> None:
    """Also not the version; so do no data, and data without an advantage."""
    one = learner()
    before = one.fingerprint
    assert one.forward_backward([]).tokens == 0
    assert not one.optim_step().applied
    assert not one.update([]).applied
    one.forward_backward([clotho.Datum(d.prompt, d.completion, 0.0) for d in data()])
    step = one.optim_step()
    assert not step.applied
    assert step.finite
    assert (one.fingerprint, one.version) == (before, 0)


def test_a_gradient_that_is_not_finite_is_dropped() -> None:
    """The next step starts without it."""
    one = learner()
    one.forward_backward(data(), lambda logp_B_T, inputs: (logp_B_T.sum() * float("nan"), {}))
    step = one.optim_step()
    assert not step.applied
    assert not step.finite
    one.forward_backward(data())
    assert one.optim_step().applied


def test_a_loss_of_ones_own_has_the_gradient_of_the_built_in_one() -> None:
    """Minus the weighted mean of advantage times log-probability is the cross-entropy, for any micro-batches."""

    def loss(logp_B_T: mx.array, inputs: clotho.LossInputs) -> tuple[mx.array, dict[str, mx.array | float]]:
        seen.append(inputs)
        value = -(inputs.weights_B_T * inputs.advantages_B_T * logp_B_T).sum()
        return value, {"tokens": inputs.mask_B_T.sum(), "one": 1.0}

    seen: list[clotho.LossInputs] = []
    own, built_in = learner(micro_batch_tokens=64), learner(micro_batch_tokens=64)
    found, expected = own.forward_backward(data(), loss), built_in.forward_backward(data(), "cross_entropy")
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.metrics == {"tokens": float(found.tokens), "one": 1.0}
    assert own.optim_step().metrics.grad_norm == pytest.approx(built_in.optim_step().metrics.grad_norm, rel=1e-4)
    (inputs,) = seen  # called once, with all data, in their order
    for row, one in enumerate(data()):
        count = len(one.tokens)
        assert isinstance(one.completion, clotho.Completion)
        assert np.array(inputs.tokens_B_T)[row, :count].tolist() == list(one.tokens)
        assert np.array(inputs.mask_B_T)[row].sum() == count
        assert np.array(inputs.sampler_logp_B_T)[row, :count] == pytest.approx(one.completion.logprobs)
        assert np.array(inputs.advantages_B_T)[row, 0] == pytest.approx(one.advantages[0])
    assert float(inputs.weights_B_T.sum()) == pytest.approx(1.0)


def test_log_probabilities_are_those_of_the_sampler() -> None:
    """Before the first step; and of each datum, in its order."""
    one = learner()
    forward = one.forward(data())
    gradient = one.forward_backward(data())
    for datum, row, other in zip(data(), forward, gradient.logprobs, strict=True):
        assert isinstance(datum.completion, clotho.Completion)
        assert row == pytest.approx(datum.completion.logprobs, abs=1e-3)
        assert other == pytest.approx(row, abs=1e-5)
    assert one.forward([]) == []


def test_cross_entropy_learns_tokens_that_nobody_sampled() -> None:
    """As in supervised fine-tuning; the objective refuses them."""
    one = learner()
    tokens = policy().tokenizer.encode("<answer>5</answer>", add_special_tokens=False)
    datum = clotho.Datum(policy().chat("What is 2 + 3?"), tokens)
    losses = []
    for _ in range(5):
        losses.append(one.forward_backward([datum], "cross_entropy").loss)
        assert one.optim_step().applied
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(ValueError, match="Sampler"):
        one.forward_backward([datum])


def test_asynchronous_forms_do_the_same() -> None:
    """They may overlap: calls are computed in their order."""

    async def work() -> None:
        await asyncio.gather(one.forward_async(data()), one.forward_backward_async(data()))
        assert (await one.optim_step_async()).applied
        assert (await one.update_async(groups())).applied

    one, two = learner(), learner()
    asyncio.run(work())
    two.forward_backward(data())
    two.optim_step()
    two.update(groups())
    assert one.fingerprint == two.fingerprint


def test_a_saved_state_continues_bit_by_bit(tmp_path: Path) -> None:
    """With the state of the optimizer; a gradient that is held is forgotten."""
    settings = {"kl_penalty": {"type": "loss", "reference": {"type": "average", "decay": 0.5}}}
    one, two = learner(**settings), learner(**settings)
    one.update(groups())
    file = one.save_state(tmp_path / "new" / "state.safetensors")
    two.forward_backward(data())
    two.load_state(file)
    assert (two.version, two.fingerprint) == (1, one.fingerprint)
    assert not two.optim_step().applied
    assert one.update(groups()).fingerprint == two.update(groups()).fingerprint


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Nothing changes then."""
    one = learner()
    other = clotho.Learner(clotho.load(str(EMBEDDED), method=clotho.LoRA(rank=2)), sampling=SAMPLING)
    file = other.save_state(tmp_path / "state.safetensors")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(file.read_bytes()[:100])
    before = one.fingerprint
    for wrong in (file, damaged, tmp_path / "absent.safetensors"):
        with pytest.raises(CheckpointError):
            one.load_state(wrong)
    with pytest.raises(CheckpointError):
        learner(optimizer="lion").load_state(one.save_state(tmp_path / "adamw.safetensors"))
    with pytest.raises(ValueError, match="safetensors"):
        one.save_state(tmp_path / "state.bin")
    assert one.fingerprint == before
    assert one.update(groups()).applied


def test_the_adapter_loads_in_mlx_lm(tmp_path: Path) -> None:
    """With the log-probabilities of the learner."""
    one = learner()
    one.update(groups())
    directory = one.save(tmp_path / "adapter")
    model, _ = mlx_lm.load(str(EMBEDDED), adapter_path=str(directory))[:2]
    datum = data()[0]
    whole = mx.array([[*datum.prompt, *datum.tokens]])
    logits = model(whole)[0, len(datum.prompt) - 1 : -1].astype(mx.float32)
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    found = [float(logp[t, token]) for t, token in enumerate(datum.tokens)]
    assert one.forward([datum])[0] == pytest.approx(found, abs=1e-3)


def test_a_printed_update_fits_on_a_screen() -> None:
    """It has the metrics, and neither arrays nor values of completions and tokens."""
    update = learner().update(groups())
    assert repr(update.metrics) in repr(update)
    assert len(repr(update)) < 2_000


def test_a_step_takes_the_rate_that_it_is_given() -> None:
    """Or that of the schedule."""
    one = learner(schedule={"type": "linear", "warmup_steps": 0}, steps=4)
    one.forward_backward(data())
    assert one.optim_step(learning_rate=0.5).metrics.learning_rate == 0.5
    one.forward_backward(data())
    assert one.optim_step().metrics.learning_rate == pytest.approx(0.75 * RATE)


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": clotho.Sampling(temperature=0.0)},
        {"sampling": clotho.Sampling(top_p=0.9)},
        {"schedule": {"type": "cosine"}},
        {"objective": "gpro"},
        {"clip_high": 0.28},
        {"learning_rate": -1.0},
    ],
)
def test_a_learner_refuses_what_it_cannot_do(settings: dict[str, Any]) -> None:
    """At its construction."""
    with pytest.raises(ProfileError):
        learner(**settings)


@pytest.mark.parametrize(
    ("prompt", "completion", "advantage"), [((), (1,), 1.0), ((1,), (), 1.0), ((1,), (2, 3), (1.0,))]
)
def test_a_datum_has_tokens_and_as_many_advantages(
    prompt: tuple[int, ...], completion: tuple[int, ...], advantage: Any
) -> None:
    """Or it is refused where it is made."""
    with pytest.raises(ValueError, match=r"token"):
        clotho.Datum(prompt, completion, advantage)


def test_a_loss_returns_a_scalar_and_metrics() -> None:
    """And is told so."""
    losses: list[Any] = [lambda logp, inputs: logp.mean(), lambda logp, inputs: (logp, {})]
    for wrong in losses:
        with pytest.raises(ValueError, match="metrics"):
            learner().forward_backward(data(), wrong)


def test_text_is_no_sequence_of_tokens() -> None:
    """Nor is a completion a list of them."""
    with pytest.raises(TypeError):
        clotho.Datum("hello", (1,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rewards"):
        learner().update([(policy().chat("2?"), groups()[0][1][0], 1.0)])  # type: ignore[list-item]


def test_an_unknown_loss_is_refused() -> None:
    """With the two that have names."""
    with pytest.raises(ValueError, match="cross_entropy"):
        learner().forward_backward(data(), "ppo")  # type: ignore[arg-type]
