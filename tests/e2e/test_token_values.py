"""Per-token values of complete runs equal a computation from the run directory and the profile alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load
from msgspec import Struct
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.e2e.conftest import CompletedRun
from tests.e2e.pipeline_process import lines, run
from tests.learner_settings import short_names
from tests.oracle.advantages import advantages
from tests.oracle.policy_loss import Example, cuts, gradient_shares
from training_run.profile.load import load_profile
from training_run.profile.schema import Profile

NOT_TRAINED = 4
FORWARD_ERROR = 3e-5
"""Largest difference of a log-probability between mlx-lm and the learner in float32, in nats; 1e-5 is usual."""


class Recorded(Struct, frozen=True, kw_only=True):
    """The arrays of the file of a step, and a group of rollouts.jsonl that ended with the step."""

    arrays: dict[str, NDArray[Any]]
    group: dict[str, Any]

    def rows(self, index: int) -> slice:
        """Rows of a completion."""
        of_group = self.arrays["completion_group"] == self.group["group_id"]
        (place,) = np.flatnonzero(of_group & (self.arrays["completion_index"] == index))
        start, end = self.arrays["completion_start"][place : place + 2]
        return slice(int(start), int(end))

    def text(self, rows: slice) -> str:
        """Text of the tokens of some rows."""
        first, last = self.arrays["text_start"][[rows.start, rows.stop]]
        return self.arrays["text"][first:last].tobytes().decode()


def recorded(run_dir: Path, step: int) -> list[Recorded]:
    """Every group that ended with a step."""
    arrays = load_file(run_dir / "tokens" / f"step-{step:06d}.safetensors")
    return [Recorded(arrays=arrays, group=g) for g in lines(run_dir / "rollouts.jsonl") if g["step"] == step]


def policy_at(run_dir: Path, step: int, profile: Profile) -> tuple[Any, Any]:
    """Model and tokenizer with the weights after a step, loaded by mlx-lm."""
    checkpoint = run_dir / "checkpoints" / f"step-{step:06d}"
    return load(profile.model.path, adapter_path=str(checkpoint) if step else None)[:2]


def forced(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> NDArray[np.float64]:
    """Log-probabilities of tokens after a prompt."""
    z_T_V = np.array(model(mx.array([prompt + tokens]))[0].astype(mx.float32), dtype=np.float64) / temperature
    z_T_V = z_T_V[len(prompt) - 1 : -1]
    logp_T: NDArray[np.float64] = z_T_V[range(len(tokens)), tokens] - np.logaddexp.reduce(z_T_V, axis=-1)
    return logp_T


def compare(run_dir: Path, step: int) -> set[int]:
    """Compare every value of the groups of a step; return the cuts that occur.

    The update of the step used the weights after the step before it. Two forward passes in float32 differ; the other
    values are computed from the recorded log-probabilities.
    """
    profile = load_profile(str(run_dir / "profile.toml"))
    settings, names = profile.learner, short_names(profile.learner)
    model, tokenizer = policy_at(run_dir, step - 1, profile)
    found = recorded(run_dir, step)
    trained = [one for one in found if one.group["outcome"] == "trained"]
    rewards = [[c["reward"] for c in one.group["completions"]] for one in trained]
    given = advantages(names.advantage, rewards, spread=names.advantage_deviation, epsilon=names.advantage_epsilon)
    examples: list[Example] = []
    logprobs: list[list[float]] = []
    places: list[tuple[Recorded, slice]] = []
    for one, own in zip(trained, given, strict=True):
        conversation = [{"role": "user", "content": one.group["prompt"]}]
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        for index, (completion, advantage) in enumerate(zip(one.group["completions"], own, strict=True)):
            rows = one.rows(index)
            assert one.text(rows) == completion["text"]
            tokens, T = one.arrays["token"][rows].tolist(), completion["tokens"]
            forced_T = forced(model, list(prompt), tokens, profile.sampling.temperature)
            logp_T = one.arrays["learner_logprob"][rows].astype(np.float64)
            sampled_T = one.arrays["sampled_logprob"][rows].astype(np.float64)
            assert len(tokens) == T
            np.testing.assert_allclose(logp_T, forced_T, rtol=1e-5, atol=FORWARD_ERROR)
            np.testing.assert_allclose(one.arrays["ratio"][rows], np.exp(logp_T - sampled_T), rtol=1e-5)
            np.testing.assert_allclose(one.arrays["advantage"][rows], advantage, rtol=1e-5)
            examples.append(
                Example(
                    group=one.group["group_id"],
                    behaviour=sampled_T.tolist(),
                    proximal=logp_T.tolist(),
                    reference=logp_T.tolist(),
                    advantage=[advantage] * T,
                    entropy=[0.0] * T,
                    learned=[True] * T,
                )
            )
            logprobs.append(logp_T.tolist())
            places.append((one, rows))
    shares = gradient_shares(examples, logprobs, settings=settings, max_tokens=profile.sampling.max_tokens)
    kinds: set[int] = set()
    for (one, rows), example, logp, expected in zip(places, examples, logprobs, shares, strict=True):
        cut = one.arrays["cut"][rows].tolist()
        assert cut == cuts(example, logp, settings)
        np.testing.assert_allclose(one.arrays["gradient_share"][rows], expected, rtol=1e-5, atol=1e-9)
        kinds |= set(cut)
    for one in found:
        if one.group["outcome"] == "discarded" and one.group["completions"]:
            assert set(one.arrays["cut"][one.rows(0)].tolist()) == {NOT_TRAINED}
            assert np.isnan(one.arrays["learner_logprob"][one.rows(0)]).all()
    return kinds


def test_per_token_values_of_an_asynchronous_run_equal_a_recomputation(finished: CompletedRun) -> None:
    """A step whose groups are stale: GRPO with a token mean, with the adapter of the step before."""
    assert {0} <= compare(finished.run_dir, 3) <= {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        (("gspo", "--learner.objective.importance-correction.high", "1.02"), {0, 2}),
        (("dr_grpo",), {0}),
        (("dapo", "--learner.objective.dynamic-sampling-max-ratio", "0"), {0}),
        (
            ("rloo", "--learner.objective.clip-low", "0.05", "--learner.objective.clip-high", "0.05",
             "--learner.objective.ratio-reference", "sampler", "--learner.objective.importance-correction", "off"),
            {0, 1},
        ),
        (("cispo", "--learner.objective.clip-high", "0.02"), {0, 1}),
        (("sapo",), {0}),
        (("dppo_tv", "--learner.objective.clip-low", "0.01", "--learner.objective.clip-high", "0.01"), {0, 1}),
        (("reinforce", "--learner.objective.importance-correction.high", "1.02"), {0, 2}),
        (
            ("ppo_decoupled", "--learner.objective.importance-correction.low", "0.98",
             "--learner.objective.importance-correction.high", "1.02"), {0, 2},
        ),
        (("grpo", "--learner.objective.outlier-high", "1.1"), {0, 3}),
    ],
    ids=str,
)  # fmt: skip
def test_per_token_values_of_every_kind_of_objective_equal_a_recomputation(
    tmp_path: Path, flags: tuple[str, ...], kinds: set[int]
) -> None:
    """Four steps with a checkpoint after each, asynchronous, so that tokens are stale."""
    result = run(
        tmp_path / "run", "--profile", "local-m3", "--steps", "4", "--checkpoint.interval", "1",
        "--checkpoint.keep-last", "9", "--learner.objective", *flags,
    )  # fmt: skip
    assert result.status == 0, result
    seen = {kind for step in (1, 2, 3, 4) for kind in compare(tmp_path / "run", step)}
    assert seen >= kinds
