"""A run starts at step 0, at a checkpoint of its own, or at a checkpoint of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from actors.prompter import Prompter
from attachments.dashboard.token_values import token_file, token_files
from clotho.models.machine import random_state
from clotho.storage.adapters import TENSORS
from clotho.storage.atomic_files import digest_file
from pipeline import wire_rollouts
from protocols.errors import CheckpointError, RunDirectoryError
from tests.training.policies_and_groups import same_bits
from tests.training_run.built_context import lost_groups, open_context, tiny_profile
from tests.training_run.start.test_startup import write_step
from training_run.directory.checkpoints import (
    checkpoint_steps,
    find_damage,
    read_checkpoint,
    read_state,
    recorded_newest,
)
from training_run.directory.run_directory import read_origin
from training_run.profile.schema import Profile
from training_run.run import RunContext
from training_run.start import starting_point
from training_run.supervision.custom_actors import CustomActors


async def test_a_run_that_trains_an_adapter_begins_with_a_checkpoint_of_its_initial_weights(tmp_path: Path) -> None:
    """It is complete, and it is not recorded as progress. Full training writes none."""
    async with open_context(tiny_profile(tmp_path)) as parts:
        path = parts.directory.checkpoints / "step-000000"
        assert find_damage(path) is None
        config = parts.policy.adapter_config
        found = parts.compute.learner.submit(
            lambda: read_checkpoint(path, expected=parts.policy.trainable(), adapter_config=config)
        ).result()
        assert same_bits(found.parameters, parts.policy_learner.parameters)
        assert recorded_newest(parts.directory.newest_checkpoint) is None
    full = tiny_profile(tmp_path, run_dir=str(tmp_path / "full"), policy={"method": {"type": "full"}})
    async with open_context(full) as parts:
        assert checkpoint_steps(parts.directory.checkpoints) == []


async def test_a_run_that_was_killed_before_its_first_update_starts_over(tmp_path: Path) -> None:
    """With the same initial weights, and with a warning that has the number of its steps."""
    profile = tiny_profile(tmp_path)
    async with open_context(profile) as parts:
        fingerprint = parts.policy.fingerprint
        lines = [{"step": number, "time/run": 1.0} for number in range(1, 6)]
        parts.directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with open_context(profile, resume=True) as parts:
        assert (parts.resumed_from, parts.policy.fingerprint) == (0, fingerprint)
        assert ["5 steps" in warning for warning in parts.start.warnings] == [True]
        assert parts.directory.metrics.read_bytes() == b""


def learner_state(parts: RunContext) -> Any:
    """Return everything that the next update depends on."""
    arrays = parts.compute.learner.submit(parts.policy_learner.state).result()
    state = parts.compute.learner.submit(random_state).result()
    policy = parts.policy
    return parts.policy_learner.parameters, arrays, (state, policy.version, policy.step, policy.fingerprint)


async def forked(profile: Profile, source: Path) -> RunContext:
    """Return the context of a fork, after its run directory was released."""
    async with open_context(profile, fork=source) as parts:
        return parts


async def test_a_fork_has_the_complete_state_of_the_other_run(tmp_path: Path) -> None:
    """Bit for bit that of the resumed run, with its histories. The fork then resumes from its own checkpoint."""
    profile = tiny_profile(tmp_path)
    state = await write_step(profile)
    source = tmp_path / "run" / "checkpoints" / "step-000003"
    other = tiny_profile(tmp_path, run_dir=str(tmp_path / "fork"))
    async with open_context(other, fork=source) as parts:
        fork = learner_state(parts)
        assert (parts.start.state, parts.progress.step, list(parts.ledger.unended(9))) == (state, 3, [5, 6, 8])
        assert [json.loads(line)["step"] for line in parts.directory.metrics.read_text().splitlines()] == [1, 2, 3]
        assert parts.history.before is not None
        assert (checkpoint_steps(parts.directory.checkpoints), parts.start.initial) == ([3], None)
        assert read_state(parts.directory.checkpoints / "step-000003") == state
    origin = read_origin(tmp_path / "fork" / "lineage.json")
    assert origin is not None
    assert (origin.kind, origin.path, origin.step, origin.settings, origin.inputs) == ("fork", str(source), 3, (), ())
    assert origin.sha256 == digest_file(source / TENSORS).sha256
    assert origin.run_id == (tmp_path / "run" / ".run_id").read_text().strip()
    for resumed in (profile, other):
        async with open_context(resumed, resume=True) as parts:
            parameters, arrays, words = learner_state(parts)
            assert same_bits(parameters, fork[0])
            assert same_bits(arrays, fork[1])
            assert words == fork[2]


async def test_a_fork_that_was_killed_before_its_first_checkpoint_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command: it has nothing of its own. Without `--fork`, it would start from other weights."""
    profile = tiny_profile(tmp_path)
    await write_step(profile)
    source = tmp_path / "run" / "checkpoints" / "step-000003"
    other = tiny_profile(tmp_path, run_dir=str(tmp_path / "fork"))

    def killed(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(starting_point, "_write_first", killed)
        with pytest.raises(InterruptedError):
            await forked(other, source)
    with pytest.raises(CheckpointError, match=f"--fork {source}"):
        async with open_context(other, resume=True):
            pass
    parts = await forked(other, source)
    assert (parts.progress.step, read_state(parts.directory.checkpoints / "step-000003").version) == (3, 2)
    with pytest.raises(RunDirectoryError, match="--resume"):
        await forked(other, source)


async def test_a_fork_may_change_what_a_resumed_run_may_not(tmp_path: Path) -> None:
    """Settings and the dataset. The lineage lists them, and a warning names changed inputs."""
    await write_step(tiny_profile(tmp_path))
    source = tmp_path / "run" / "checkpoints" / "step-000003"
    (tmp_path / "other.jsonl").write_text("".join(f'{{"prompt": "{i}?", "answer": "1"}}\n' for i in range(9)))
    changed: dict[str, Any] = {
        "run_dir": str(tmp_path / "fork"),
        "learner": {"optimizer": {"learning_rate": 0.5}, "batch_size": 3},
        "data": {"train": str(tmp_path / "other.jsonl")},
        "policy": {"method": {"type": "lora", "rank": 2, "scale": 2.0, "dropout": 0.5}},
    }
    profile = tiny_profile(tmp_path, **changed)
    async with open_context(profile, fork=source) as parts:
        custom = CustomActors((), parts.services(), lost_groups())
        rollouts = wire_rollouts(parts, custom, custom.channel("scored", 1), parts.sampler.client)
        assert isinstance(rollouts.source.actor, Prompter)
        assert len(list(rollouts.source.actor._group_ids)) == 7 * 3, "the groups of the 7 other steps"
        assert read_state(parts.directory.checkpoints / "step-000003").inputs == parts.inputs
    origin = read_origin(parts.directory.lineage)
    assert origin is not None
    assert [text.partition(":")[0] for text in origin.settings] == [
        "data.train", "learner.batch_size", "learner.optimizer.learning_rate", "policy.method.dropout",
    ]  # fmt: skip
    assert origin.inputs == ("dataset",)
    assert ["dataset" in warning for warning in parts.start.warnings if "inputs" in warning] == [True]
    async with open_context(profile, resume=True) as parts:
        assert parts.resumed_from == 3


async def test_a_fork_with_another_optimizer_starts_its_state_anew(tmp_path: Path) -> None:
    """With a warning. The weights and the step are those of the other run."""
    await write_step(tiny_profile(tmp_path))
    source = tmp_path / "run" / "checkpoints" / "step-000003"
    profile = tiny_profile(tmp_path, run_dir=str(tmp_path / "fork"), learner={"optimizer": "lion"})
    async with open_context(profile, fork=source) as parts:
        assert ["anew" in warning for warning in parts.start.warnings if "optimizer" in warning] == [True]
        assert (parts.policy.step, parts.policy_learner.version) == (3, 2)
        arrays = parts.compute.learner.submit(parts.policy_learner.state).result()
        moments = [array for name, array in arrays.items() if name.startswith("optimizer.") and array.ndim > 1]
        assert moments
        assert not any(mx.any(array).item() for array in moments)


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_fork_that_does_not_fit_is_refused(tmp_path: Path, damaged: bool) -> None:
    """Another rank, or a damaged checkpoint. The new run directory is not created."""
    await write_step(tiny_profile(tmp_path))
    source = tmp_path / "run" / "checkpoints" / "step-000003"
    rank = 2 if damaged else 4
    if damaged:
        (source / "optimizer.safetensors").write_bytes(b"")
    method = {"type": "lora", "rank": rank, "scale": 2.0}
    profile = tiny_profile(tmp_path, run_dir=str(tmp_path / "fork"), policy={"method": method})
    with pytest.raises(CheckpointError) as caught:
        await forked(profile, source)
    assert "--fork" in str(caught.value)
    assert ("damaged" if damaged else "rank is 2, not 4") in str(caught.value)
    assert not (tmp_path / "fork").exists()


async def test_a_run_resumes_from_a_chosen_step_and_keeps_what_is_later(tmp_path: Path) -> None:
    """Later checkpoints and the histories move to `superseded/`, and a warning says where."""
    profile = tiny_profile(tmp_path)
    await write_step(profile)
    tokens = tmp_path / "run" / "tokens"
    tokens.mkdir()
    token_file(tokens, 3).touch()
    async with open_context(profile, resume=True, resume_step=0) as parts:
        assert (parts.resumed_from, parts.progress.step, parts.history.before is not None) == (0, 0, True)
        assert ["superseded" in warning and "(3)" in warning for warning in parts.start.warnings] == [True]
        assert checkpoint_steps(parts.directory.checkpoints) == [0]
        assert parts.directory.metrics.read_bytes() == b""
    kept = tmp_path / "run" / "superseded" / "001-after-step-000000"
    assert find_damage(kept / "checkpoints" / "step-000003") is None
    assert (list(token_files(kept / "tokens")), list(token_files(tokens))) == ([3], [])
    assert len((kept / "metrics.jsonl").read_text().splitlines()) == 5
    async with open_context(profile, resume=True) as parts:
        assert parts.resumed_from == 0
    async with open_context(profile, resume=True, resume_step=0) as parts:
        assert parts.start.warnings == ()
    assert len(list((tmp_path / "run" / "superseded").iterdir())) == 1


async def test_a_step_without_an_intact_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    """The message has the steps that exist, and nothing changes."""
    profile = tiny_profile(tmp_path)
    await write_step(profile)
    for step, expected in ((7, "0, 3"), (3, "damaged")):
        if step == 3:
            (tmp_path / "run" / "checkpoints" / "step-000003" / "optimizer.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError) as caught:
            async with open_context(profile, resume=True, resume_step=step):
                pass
        assert expected in str(caught.value)
    assert not (tmp_path / "run" / "superseded").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5
