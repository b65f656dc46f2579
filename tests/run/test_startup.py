"""What a run is made of: checked before anything is changed, and after a resume exactly where the run stood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_map

from clotho.config.load import load_profile
from clotho.config.schema import Profile
from clotho.models.machine import random_state
from clotho.run.context import RunContext
from clotho.storage.checkpoints import Snapshot, write_checkpoint
from protocols.accounting import LedgerState
from protocols.checkpoint import RunState
from protocols.errors import CheckpointError, ClothoError, DatasetError, ModelError, ProfileError
from tests.run.built_context import assembled, tiny_profile
from tests.training.policies_and_groups import same_bits

LEDGER = LedgerState(all_ended_below=5, ended_above=(7,), trained=4, discarded={"stale": 2})


async def keep(profile: Profile, *, step: int = 3, measured: bool = True) -> RunState:
    """Begin a run, and leave it as if killed after a checkpoint of this step."""
    async with assembled(profile) as parts:

        def write() -> RunState:
            parameters = tree_map(lambda array: array + step, parts.policy.trainable())
            optimizer = {name: array + 1 for name, array in parts.policy_learner.state().items()}
            mx.random.seed(99)
            state = RunState(
                step=step, version=step - 1, fingerprint="kept", ledger=LEDGER, prompted=11,
                random_state=random_state(),
                bad_steps=1, train_seconds=2.5, sampled_tokens=100, trained_tokens=50, inputs=parts.inputs,
            )  # fmt: skip
            config = parts.policy.adapter_config
            snapshot = Snapshot(parameters=parameters, optimizer=optimizer, state=state, adapter_config=config)
            write_checkpoint(parts.directory.checkpoints, snapshot, keep_last=3)
            return state

        state = parts.executor.submit(write).result()
        evaluation = {
            "step": 0, "policy_version": 0, "accuracy": 0.25, "accuracy_by_type": {"echo": 0.25}, "problems": 2,
            "ungraded": 0, "completion_tokens": 8, "time/evaluation": 0.5, "time/run": 1.0, "final": False,
        }  # fmt: skip
        if measured:
            parts.directory.evaluations.write_text(json.dumps(evaluation) + "\n")
        lines = [{"step": number, "time/run": 10.0 * number} for number in range(1, 6)]
        parts.directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return state


async def refusal(profile: Profile, *, resume: bool = False) -> ClothoError:
    """Why these parts cannot be had, in one line."""
    with pytest.raises(ClothoError) as caught:
        async with assembled(profile, resume=resume):
            raise AssertionError("it was assembled")
    assert "\n" not in str(caught.value)
    return caught.value


async def test_a_new_run_begins_at_nothing(tmp_path: Path) -> None:
    """The policy as loaded, empty books, and its profile written down so that it loads again."""
    profile = tiny_profile(tmp_path)
    async with assembled(profile) as parts:
        assert (parts.state, parts.base, parts.warnings, parts.history.before) == (None, None, (), None)
        assert list(parts.ledger.unended(3)) == [0, 1, 2]
        assert (parts.progress.step, parts.policy.version, parts.policy_learner.version) == (0, 0, 0)
        assert sorted(parts.inputs) == ["dataset", "model", "tokenizer"]
        assert load_profile(str(parts.directory.profile)) == profile
        assert parts.executor.submit(lambda: parts.engine.has_work).result() is False


async def test_held_out_problems_without_a_correct_reward_are_reported_or_refused(tmp_path: Path) -> None:
    """A warning for each type without such a reward; an error if no held-out problem has one."""
    held_out = tmp_path / "heldout.jsonl"
    problems = [{"prompt": "1?", "answer": "1", "type": "echo"}, {"prompt": "2?", "answer": "2", "type": "other"}]
    held_out.write_text("\n".join(json.dumps(problem) for problem in problems))
    rewards = [{"name": "format"}, {"name": "exact", "correct": True, "types": ["echo"]}]
    profile = tiny_profile(tmp_path, rewards=rewards, data={"heldout": str(held_out)})
    async with assembled(profile) as context:
        assert [("other" in warning, "ungraded" in warning) for warning in context.warnings] == [(True, True)]
    held_out.write_text(json.dumps(problems[1]))
    other = tiny_profile(tmp_path, rewards=rewards, data={"heldout": str(held_out)}, run_dir=str(tmp_path / "other"))
    assert isinstance(await refusal(other), ProfileError)
    async with assembled(msgspec.structs.replace(other, eval=msgspec.structs.replace(other.eval, enabled=False))):
        pass


async def test_a_resumed_run_stands_where_the_checkpoint_does(tmp_path: Path) -> None:
    """Weights, moments, books, random numbers, counters; histories are cut back to its step."""
    profile = tiny_profile(tmp_path)
    state = await keep(profile)
    async with assembled(profile, resume=True) as parts:
        assert parts.state == state
        assert parts.ledger.state() == LEDGER
        assert list(parts.ledger.unended(9)) == [5, 6, 8]
        progress = parts.progress
        assert (progress.step, progress.bad_steps, progress.train_seconds, progress.trained_tokens) == (3, 1, 2.5, 50)
        assert (parts.policy.version, parts.policy.step, parts.policy.fingerprint) == (2, 3, "kept")
        assert (parts.policy_learner.version, parts.policy_learner.fingerprint) == (2, "kept")
        assert same_bits(parts.policy_learner.parameters, parts.policy.trainable())
        assert parts.executor.submit(lambda: (random_state(), spread(parts))).result() == (state.random_state, 3.0)
        assert [json.loads(line)["step"] for line in parts.directory.metrics.read_text().splitlines()] == [1, 2, 3]
        assert (parts.history.seconds, parts.history.before and parts.history.before.accuracy) == (30.0, 0.25)
        assert parts.base is None


def spread(parts: RunContext) -> float:
    """The smallest of the adapter's second halves, which are 0 in a new adapter."""
    return float(min(module["lora_b"].min().item() for module in lora(parts.policy.trainable())))


def lora(tree: Any) -> list[Any]:
    """Every adapter of a tree."""
    if isinstance(tree, dict) and "lora_b" in tree:
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [found for branch in branches for found in lora(branch)]


async def test_a_base_policy_that_was_not_measured_yet_still_can_be(tmp_path: Path) -> None:
    """A run killed before its first measurement was written: the weights before the first update are kept at hand."""
    profile = tiny_profile(tmp_path)
    await keep(profile, measured=False)
    async with assembled(profile, resume=True) as parts:
        assert parts.base is not None
        assert float(max(module["lora_b"].max().item() for module in lora(parts.base))) == 0.0


async def test_a_damaged_checkpoint_is_stepped_over_with_a_warning(tmp_path: Path) -> None:
    """The one before it is whole; of none, the run begins anew."""
    profile = tiny_profile(tmp_path)
    await keep(profile)
    (tmp_path / "run" / "checkpoints" / "step-000003" / "state.json").write_text("{}")
    async with assembled(profile, resume=True) as parts:
        assert parts.state is None
        assert (parts.policy.version, parts.progress.step) == (0, 0)
        assert len(parts.warnings) == 1
        assert "step-000003 is damaged and was skipped" in parts.warnings[0]
        assert parts.directory.metrics.read_bytes() == b""


async def test_a_resumed_run_must_read_and_learn_the_same(tmp_path: Path) -> None:
    """Another dataset, or another setting that matters, is refused by name, and nothing is changed."""
    profile = tiny_profile(tmp_path)
    await keep(profile)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    error = await refusal(tiny_profile(tmp_path, learner={"optimizer": {"learning_rate": 0.5}}), resume=True)
    assert isinstance(error, CheckpointError)
    assert "learner.optimizer.learning_rate" in str(error)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('\n{"prompt": "99?", "answer": "99"}')
    error = await refusal(profile, resume=True)
    assert "inputs changed since the start of the run: dataset" in str(error)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert error.exit_status == 2


async def test_a_learner_of_another_kind_is_refused_where_no_profile_tells(tmp_path: Path) -> None:
    """The state of one optimizer is none of another: one line, and it names the checkpoint."""
    await keep(tiny_profile(tmp_path))
    (tmp_path / "run" / "profile.toml").unlink()
    error = await refusal(tiny_profile(tmp_path, learner={"optimizer": "lion"}), resume=True)
    assert isinstance(error, CheckpointError)
    assert "step-000003" in str(error)


async def test_mistakes_are_found_before_the_run_directory_is_touched(tmp_path: Path) -> None:
    """Each in its one line; the directory that was made for the run is gone again."""
    stanza = {"name": "mine", "factory": "nowhere:NullSampleLog", "mode": "add"}
    (tmp_path / "long.jsonl").write_text('{"prompt": "%s", "answer": "1"}\n' % ("7" * 200) * 2)
    wrong: list[tuple[dict[str, Any], type[ClothoError], str]] = [
        ({"actors": [stanza]}, ProfileError, "'mine': nowhere:NullSampleLog cannot be imported"),
        ({"rewards": [{"name": "nowhere:reward", "correct": True}]}, ProfileError, "nowhere"),
        ({"model": {"path": str(tmp_path / "none")}}, ModelError, "none"),
        ({"data": {"train": str(tmp_path / "none.jsonl")}}, DatasetError, "none.jsonl does not exist"),
        (
            {"data": {"train": str(tmp_path / "long.jsonl")}},
            ProfileError,
            "has 200 tokens, and the policy's context",
        ),
        ({"rewards": [{"name": "exact", "types": ["ecko"], "correct": True}]}, ProfileError, "there are: echo"),
        ({"sampling": {"stop_token_ids": [10**6]}}, ProfileError, "sampling.stop_token_ids: token 1000000"),
        ({"engine": {"kv_cache_tokens": 5}}, ProfileError, "engine.kv_cache_tokens is 5"),
        ({"learner": {"objective": "tests.training.broken_objectives:failing"}}, ModelError, "KeyError: 'temperature'"),
    ]
    for sections, kind, message in wrong:
        error = await refusal(tiny_profile(tmp_path, **sections))
        assert isinstance(error, kind)
        assert message in str(error)
        assert not (tmp_path / "run").exists()
