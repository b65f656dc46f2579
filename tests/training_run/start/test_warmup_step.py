"""The rehearsal: an update before the first prompt, which leaves nothing behind but what it found out."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from msgspec import convert
from msgspec.structs import replace

from clotho.models.machine import random_state
from clotho.models.parameters import flat
from clotho.models.policy import Policy
from clotho.training.update import PolicyLearner
from protocols.errors import ModelError, ProfileError
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import VOCAB, random_groups, same_bits, tiny_policy
from training_run.profile.schema import Profile
from training_run.start.warmup_step import DummyBatchSize, dummy_batch_size, dummy_groups, run_warmup_step
from training_run.update_values import UpdateKl

CONTEXT = 128
TEACHER = {"distillation_weight": 0.5}
REFERENCE = {"kl_beta": 0.1, "reference": "environment"}


def a_profile(*, sampling: dict[str, Any] | None = None, batch_size: int = 2, **learner: Any) -> Profile:
    """Two groups of two completions of at most eight tokens."""
    tables = {
        "model": {"path": "models/tiny"},
        "data": {"train": "problems.jsonl"},
        "rewards": [{"name": "exact", "correct": True}],
        "sampling": {"group_size": 2, "max_tokens": 8, **(sampling or {})},
    }
    return replace(convert(tables, Profile), learner=learner_settings(batch_size=batch_size, **learner))


def a_learner(profile: Profile, policy: Policy) -> PolicyLearner:
    """The learner of a profile."""
    return PolicyLearner(policy, profile.learner, profile.sampling, steps=10, measure=UpdateKl(1))


def test_the_first_update_is_the_same_with_and_without_a_rehearsal() -> None:
    """Parameters, optimizer and random numbers are as before, also where dropout draws some."""
    profile, groups = a_profile(), random_groups(VOCAB)
    learners = [a_learner(profile, tiny_policy(dropout=0.5)) for _ in range(2)]
    mx.random.seed(3)
    before = random_state()
    served, state = learners[0].parameters, learners[0].state()
    run_warmup_step(learners[0], profile, context=CONTEXT)
    assert random_state() == before
    assert learners[0].parameters is served
    assert learners[0].version == 0
    assert same_bits(learners[0].state(), state)
    updates = []
    for learner in learners:
        mx.random.seed(3)
        updates.append(learner.update(groups))
    assert updates[0].fingerprint == updates[1].fingerprint
    assert same_bits(flat(updates[0].parameters), flat(updates[1].parameters))


def test_updates_that_are_rehearsed_in_a_row_have_the_metrics_of_a_run_that_takes_them() -> None:
    """Each starts from the one before. Afterwards the learner is where it was, with its reference policy."""
    profile, groups = a_profile(kl_beta=0.1, reference="average"), random_groups(VOCAB)
    rehearsing, updating = (a_learner(profile, tiny_policy()) for _ in range(2))
    served, state = rehearsing.parameters, rehearsing.state()
    found = rehearsing.rehearse(((step, groups) for step in (0, 1, 4)), measure_update_kl=True)
    taken = [updating.update(groups, step=step) for step in (0, 1, 4)]
    assert found == [update.metrics for update in taken]
    assert rehearsing.parameters is served
    assert (rehearsing.version, updating.version) == (0, 3)
    assert same_bits(rehearsing.state(), state)
    assert rehearsing.update(groups).fingerprint == taken[0].fingerprint


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"micro_batch_tokens": 1024}, DummyBatchSize(completions=4, tokens=8)),
        ({"micro_batch_tokens": 32}, DummyBatchSize(completions=2, tokens=8)),
        ({"micro_batch_tokens": 10}, DummyBatchSize(completions=1, tokens=5)),
        ({"micro_batch_tokens": 1}, DummyBatchSize(completions=1, tokens=1)),
        ({"micro_batch_tokens": 1024, "batch_size": 100}, DummyBatchSize(completions=64, tokens=8)),
        ({"sampling": {"max_tokens": 4000}, "micro_batch_tokens": 10_000}, DummyBatchSize(completions=4, tokens=64)),
    ],
)
def test_it_is_as_large_as_one_micro_batch_at_most(settings: dict[str, Any], size: DummyBatchSize) -> None:
    """And no larger than an update, with completions no longer than they can get."""
    assert dummy_batch_size(a_profile(**settings), context=CONTEXT) == size


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "environment"},
        {"advantage": "batch"},
        REFERENCE,
        REFERENCE | {"kl_in": "reward"},
        {"kl_beta": 0.1, "reference": "base"},
        {"kl_beta": 0.1, "reference": "average"},
        TEACHER,
        {"entropy_weight": 0.1},
        {"sampling": {"top_k": 3}},
        {"sampling": {"top_k": 3}} | TEACHER | REFERENCE,
        {"num_minibatches": 2, "update_epochs": 2},
        {"update_epochs": 2, "ratio_reference": "batch_start_interpolated", "correction": "truncate"},
        {"mask_truncated": True, "optimizer": "muon"},
        {"layout": "packed"},
        {"layout": "padded", "objective": "gspo"},
        {"batch_size": 3, "micro_batch_tokens": 48},
    ],
)
def test_whatever_the_settings_ask_of_a_group_is_there(settings: dict[str, Any]) -> None:
    """Log-probabilities of a reference, advantages of an environment, a teacher, and what could have been sampled."""
    profile = a_profile(**settings)
    run_warmup_step(a_learner(profile, tiny_policy()), profile, context=CONTEXT)


@pytest.mark.parametrize(("sampling", "lengths"), [({}, []), ({"top_k": 3}, [12, 12])])
def test_only_a_restricted_sampling_has_supports(sampling: dict[str, Any], lengths: list[int]) -> None:
    """A token identifier of four bytes for each token that could have been sampled."""
    groups = dummy_groups(a_profile(sampling=sampling), DummyBatchSize(completions=1, tokens=2))
    assert [len(support) for support in groups[0].group.completions[0].supports] == lengths


class Factored(nn.Module):
    """A block that MLX computes, and has no gradient of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.inner(x)
        return y + mx.linalg.qr(y, stream=mx.cpu)[0][..., :1]


@pytest.mark.needs_float32
def test_a_model_that_has_no_gradient_is_refused_in_one_line() -> None:
    """With what MLX says of it."""
    profile = a_profile()
    learner = a_learner(profile, tiny_policy())
    block = cast(Any, learner.model.model).layers[1]
    block.mlp = Factored(block.mlp)
    with pytest.raises(
        ModelError, match=r"^model models/tiny cannot be trained by objective grpo: .*[Nn]ot implemented"
    ):
        run_warmup_step(learner, profile, context=CONTEXT)


def test_an_objective_that_fails_is_refused_in_one_line() -> None:
    """Whatever it raises; what it returns is looked at as in any update."""
    failing, averaged = (
        a_profile(objective=f"tests.training.broken_objectives:{name}") for name in ("failing", "averaged")
    )
    with pytest.raises(ModelError, match=r"tests.training.broken_objectives:failing: KeyError: 'temperature'$"):
        run_warmup_step(a_learner(failing, tiny_policy()), failing, context=CONTEXT)
    with pytest.raises(ProfileError, match="must return a PolicyLoss"):
        run_warmup_step(a_learner(averaged, tiny_policy()), averaged, context=CONTEXT)
