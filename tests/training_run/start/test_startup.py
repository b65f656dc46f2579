"""Startup checks a run before it changes anything, and a resumed run continues at its checkpoint."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_map
from msgspec.structs import replace

from clotho.models.machine import random_state
from clotho.settings.bounds import Off
from protocols.accounting import LedgerState
from protocols.checkpoint import RunState
from protocols.compute import MemoryLimit
from protocols.errors import CheckpointError, ClothoError, DatasetError, ModelError, ProfileError
from protocols.finding import Finding
from tests.e2e.child_processes import descendants, wait_until_ended
from tests.training.policies_and_groups import random_groups, same_bits
from tests.training_run.built_context import open_context, tiny_profile
from training_run.directory.checkpoints import Snapshot, read_checkpoint, write_checkpoint
from training_run.profile.load import load_profile
from training_run.profile.schema import Profile
from training_run.run import RunContext
from training_run.start import resume, startup
from training_run.supervision.watchdog import StartupWatch

REMOTE = {"type": "remote", "server_url": ["http://127.0.0.1:1"]}
LEDGER = LedgerState(all_ended_below=5, ended_above=(7,), trained=4, discarded={"stale": 2})


async def write_step(
    profile: Profile, *, step: int = 3, measured: bool = True, act: Callable[[RunContext], None] = lambda run: None
) -> RunState:
    """Start a run and stop it after a checkpoint of this step, as after a kill. act: what happens before."""
    async with open_context(profile) as parts:
        act(parts)
        attached = parts.attached.parts.collect()
        parts.attached.parts.take(attached)

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
            snapshot = Snapshot(
                parameters=parameters,
                optimizer=optimizer,
                state=state,
                parts=parts.attached.parts.whole(attached),
                adapter_config=config,
            )
            write_checkpoint(parts.directory.checkpoints, snapshot, keep_last=3)
            return state

        state = parts.compute.learner.submit(write).result()
        evaluation = {
            "step": 0, "policy_version": 0, "accuracy": 0.25, "accuracy_interval": [0.0, 1.0],
            "accuracy_by_type": {"echo": 0.25}, "problems": 2,
            "ungraded": 0, "completion_tokens": 8, "time/evaluation": 0.5, "time/run": 1.0, "final": False,
        }  # fmt: skip
        if measured:
            parts.directory.evaluations.write_text(json.dumps(evaluation) + "\n")
        lines = [{"step": number, "time/run": 10.0 * number} for number in range(1, 6)]
        parts.directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return state


async def refusal(profile: Profile, *, resume: bool = False) -> ClothoError:
    """Return the error message of a refused start."""
    with pytest.raises(ClothoError) as caught:
        async with open_context(profile, resume=resume):
            raise AssertionError("it was assembled")
    assert "\n" not in str(caught.value)
    return caught.value


async def test_a_checkpoint_that_takes_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every phase of the start."""
    profile = tiny_profile(tmp_path, monitor={"watchdog_seconds": 0.01})
    await write_step(profile)
    reported = threading.Event()

    def note(phase: str, seconds: float, hint: str) -> None:
        if phase == "checkpoint and histories":
            reported.set()

    def slow(path: Path, **expected: Any) -> Any:
        assert reported.wait(20)
        return read_checkpoint(path, **expected)

    monkeypatch.setattr(startup, "_report_slow", note)
    monkeypatch.setattr(resume, "read_checkpoint", slow)
    async with open_context(profile, resume=True) as parts:
        assert parts.progress.step == 3


async def test_a_slow_warmup_step_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a check of the start has found it."""
    found = Finding(name="slow_quantized", fact="quantized", consequence="slow", advice="expand")
    monkeypatch.setattr(startup, "start_findings", lambda *_: (replace(found, name="on_battery", fact="off"), found))
    hints: list[str] = []

    @contextmanager
    def phase(self: StartupWatch, name: str, hint: str = "") -> Iterator[None]:
        hints.extend([hint] if name == "warmup step" else [])
        yield

    monkeypatch.setattr(StartupWatch, "phase", phase)
    async with open_context(tiny_profile(tmp_path)):
        assert hints == ["quantized; expand"]


async def test_a_new_run_starts_at_step_zero(tmp_path: Path) -> None:
    """The loaded policy, an empty ledger, and a written profile that loads again."""
    profile = tiny_profile(tmp_path)
    async with open_context(profile) as parts:
        assert (parts.start.state, parts.start.initial, parts.start.warnings, parts.history.before) == (
            None,
            None,
            (),
            None,
        )
        assert list(parts.ledger.unended(3)) == [0, 1, 2]
        assert (parts.progress.step, parts.policy.version, parts.policy_learner.version) == (0, 0, 0)
        assert sorted(parts.inputs) == ["dataset", "model", "tokenizer"]
        assert load_profile(str(parts.directory.profile)) == profile
        assert parts.compute.decode.submit(lambda: parts.sampler.engine.has_work).result() is False


async def test_held_out_problems_without_a_correct_reward_are_reported_or_refused(tmp_path: Path) -> None:
    """A warning for each such type, and an error if no held-out problem has a correct reward."""
    held_out = tmp_path / "heldout.jsonl"
    problems = [
        {"prompt": "held out 1?", "answer": "1", "type": "echo"},
        {"prompt": "held out 2?", "answer": "2", "type": "other"},
    ]
    held_out.write_text("\n".join(json.dumps(problem) for problem in problems))
    rewards = [{"name": "format"}, {"name": "exact", "correct": True, "types": ["echo"]}]
    profile = tiny_profile(tmp_path, rewards=rewards, data={"heldout": str(held_out)})
    async with open_context(profile) as context:
        assert [("other" in warning, "ungraded" in warning) for warning in context.start.warnings] == [(True, True)]
    held_out.write_text(json.dumps(problems[1]))
    other = tiny_profile(tmp_path, rewards=rewards, data={"heldout": str(held_out)}, run_dir=str(tmp_path / "other"))
    assert isinstance(await refusal(other), ProfileError)
    async with open_context(msgspec.structs.replace(other, eval=Off())):
        pass


def reward_processes() -> list[int]:
    """Return the worker processes of this process."""
    return [
        process for process, command in descendants(os.getpid()).items() if "training_run.rewards.worker" in command
    ]


@pytest.mark.parametrize(
    ("name", "error", "told"), [("one_argument", ProfileError, "one_argument"), ("length", ModelError, "")]
)
async def test_reward_processes_start_before_the_model_is_loaded_and_end_if_the_start_fails(
    tmp_path: Path, name: str, error: type[Exception], told: str
) -> None:
    """A function that cannot be used is refused although the model is missing."""
    rewards = [{"name": f"tests.rewards.sample_rewards:{name}", "correct": True}]
    refused = await refusal(tiny_profile(tmp_path, rewards=rewards, model={"path": str(tmp_path / "missing")}))
    assert isinstance(refused, error)
    assert told in str(refused)
    assert wait_until_ended(reward_processes())


async def test_a_resumed_run_continues_at_its_checkpoint(tmp_path: Path) -> None:
    """Weights, optimizer state, ledger, random state and counters are restored. The logs are truncated to the step."""
    profile = tiny_profile(tmp_path)
    state = await write_step(profile)
    async with open_context(profile, resume=True) as parts:
        assert parts.start.state == state
        assert parts.ledger.state() == LEDGER
        assert list(parts.ledger.unended(9)) == [5, 6, 8]
        progress = parts.progress
        assert (progress.step, progress.bad_steps, progress.train_seconds, progress.trained_tokens) == (3, 1, 2.5, 50)
        assert (parts.policy.version, parts.policy.step, parts.policy.fingerprint) == (2, 3, "kept")
        assert (parts.policy_learner.version, parts.policy_learner.fingerprint) == (2, "kept")
        assert same_bits(parts.policy_learner.parameters, parts.policy.trainable())
        assert parts.compute.learner.submit(lambda: (random_state(), spread(parts))).result() == (
            state.random_state,
            3.0,
        )
        assert [json.loads(line)["step"] for line in parts.directory.metrics.read_text().splitlines()] == [1, 2, 3]
        assert (parts.history.seconds, parts.history.before and parts.history.before.accuracy) == (30.0, 0.25)
        assert parts.start.initial is None


def spread(parts: RunContext) -> float:
    """Return the smallest maximum of the lora_b matrices, which are 0 in a new adapter."""
    return float(min(module["lora_b"].min().item() for module in lora(parts.policy.trainable())))


def lora(tree: Any) -> list[Any]:
    """Return every adapter of a parameter tree."""
    if isinstance(tree, dict) and "lora_b" in tree:
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [found for branch in branches for found in lora(branch)]


async def test_a_base_policy_without_an_evaluation_is_kept(tmp_path: Path) -> None:
    """A run killed before its first evaluation still evaluates the initial weights."""
    profile = tiny_profile(tmp_path)
    await write_step(profile, measured=False)
    async with open_context(profile, resume=True) as parts:
        assert parts.start.initial is not None
        assert float(max(module["lora_b"].max().item() for module in lora(parts.start.initial))) == 0.0


async def test_a_run_without_an_intact_checkpoint_is_refused(tmp_path: Path) -> None:
    """The run directory does not change, so that a copy of the checkpoints can be restored."""
    profile = tiny_profile(tmp_path)
    await write_step(profile)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "checkpoints" / "step-000003" / "state.json").write_text("{}")
    error = await refusal(profile, resume=True)
    assert isinstance(error, CheckpointError)
    assert "step-000003" in str(error)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


async def test_records_that_the_histories_lack_are_part_of_the_context(tmp_path: Path) -> None:
    """The warnings are logged when the run starts, and the gaps are printed in its summary."""
    profile = tiny_profile(tmp_path)
    await write_step(profile)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[1:]))
    async with open_context(profile, resume=True) as parts:
        assert [(gap.file, gap.missing) for gap in parts.start.gaps] == [("metrics.jsonl", 1), ("rollouts.jsonl", 6)]
        assert len(parts.start.warnings) == 2


async def test_a_resumed_run_requires_the_same_dataset_and_settings(tmp_path: Path) -> None:
    """A difference is refused with its name, and no file is changed."""
    profile = tiny_profile(tmp_path)
    await write_step(profile)
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


async def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """If the profile cannot tell, the message names the checkpoint."""
    await write_step(tiny_profile(tmp_path))
    (tmp_path / "run" / "profile.toml").unlink()
    error = await refusal(tiny_profile(tmp_path, learner={"optimizer": "lion"}), resume=True)
    assert isinstance(error, CheckpointError)
    assert "step-000003" in str(error)


async def test_mistakes_are_found_before_the_run_directory_changes(tmp_path: Path) -> None:
    """Each has one message. A run directory created for the run is removed."""
    stanza = {"name": "mine", "factory": "nowhere:NullSampleLog", "mode": "add"}
    (tmp_path / "long.jsonl").write_text('{"prompt": "%s", "answer": "1"}\n' % ("7" * 200) * 2)
    wrong: list[tuple[dict[str, Any], type[ClothoError], str]] = [
        ({"actors": [stanza]}, ProfileError, "'mine': nowhere:NullSampleLog cannot be imported"),
        ({"rewards": [{"name": "nowhere:reward", "correct": True}]}, ProfileError, "nowhere"),
        (
            {"rewards": [{"name": "tests.rewards.trl_rewards:reward_func", "run_in": "thread", "correct": True}]},
            ProfileError,
            "'ground_truth', and the dataset has no such column; columns: answer, prompt, type",
        ),
        ({"model": {"path": str(tmp_path / "none")}}, ModelError, "none"),
        ({"data": {"train": str(tmp_path / "none.jsonl")}}, DatasetError, "none.jsonl does not exist"),
        ({"data": {"train": str(tmp_path / "long.jsonl")}}, ProfileError, "has 200 tokens, and the policy's context"),
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


async def test_the_dataset_is_read_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model takes minutes; a mistake in the dataset is reported before."""
    loads = list[object]()
    monkeypatch.setattr(startup, "_load_policy", lambda *arguments: loads.append(arguments))
    profile = tiny_profile(tmp_path)
    data = replace(profile.data, train=str(tmp_path / "missing.jsonl"))
    with pytest.raises(DatasetError):
        async with open_context(replace(profile, data=data)):
            pass
    assert loads == []


async def test_a_run_that_exceeds_the_memory_limit_is_refused_before_the_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of the device. So is a wired limit on a machine where it would have no effect."""
    monkeypatch.setattr(
        "training_run.memory.report.memory_limit", lambda: MemoryLimit(bytes=2**12, source="metal", installed=2**13)
    )
    error = await refusal(tiny_profile(tmp_path))
    assert isinstance(error, ProfileError)
    assert error.exit_status == 2
    monkeypatch.setattr(
        "training_run.memory.report.memory_limit", lambda: MemoryLimit(bytes=2**33, source="installed", installed=2**33)
    )
    error = await refusal(tiny_profile(tmp_path, memory={"wired_limit_mib": 1024}))
    assert isinstance(error, ProfileError)
    assert "memory.wired_limit_mib" in str(error)
    assert not (tmp_path / "run").exists()


async def test_the_limits_of_mlx_follow_from_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and cache always, the wired limit only if the profile sets it."""
    set_limits: dict[str, int] = {}
    for name in ("memory", "cache", "wired"):
        monkeypatch.setattr(mx, f"set_{name}_limit", lambda value, name=name: set_limits.update({name: value}))
    device = MemoryLimit(bytes=2**30, source="metal", installed=2**31)
    monkeypatch.setattr("training_run.memory.report.memory_limit", lambda: device)
    async with open_context(tiny_profile(tmp_path)):
        assert set_limits == {"memory": 2**30, "cache": 512 * 2**20}
    async with open_context(tiny_profile(tmp_path / "wired", memory={"wired_limit_mib": 256})):
        assert set_limits["wired"] == 256 * 2**20


@pytest.mark.parametrize(("sections", "computed"), [({}, False), ({"generator": REMOTE}, True)])
async def test_values_of_tokens_are_computed_for_the_comparison_with_other_servers(
    sections: dict[str, Any], computed: bool, tmp_path: Path
) -> None:
    """Also if the run writes none of them."""
    profile = tiny_profile(tmp_path, monitor={"token_values_mb": 0}, **sections)
    async with open_context(profile) as parts:
        update = parts.policy_learner.update(random_groups(20))
        assert bool(update.tokens) is computed
