"""Runs that learn from a teacher: the whole program with the embedded policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attachments.distillation import attachment
from attachments.distillation.tests.teachers import EMBEDDED, TeacherServer, other_model
from protocols.errors import ProfileError
from tests.e2e.pipeline_process import PROBLEMS, adapter, continued, killed_and_continued, lines, metrics, run
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import load_profile

SMALL = {
    "--profile": "local-m3", "--learner.batch-size": "4", "--sampling.group-size": "4", "--server": "off",
    "--async": "false", "--learner.schedule": "constant", "--eval": "off", "--sampling.max-tokens": "32",
    "--checkpoint.interval": "1", "--learner.distillation-weight": "1",
    "--data.train": str(PROBLEMS / "train.jsonl"), "--data.heldout": str(PROBLEMS / "heldout.jsonl"),
}  # fmt: skip


def words(teacher: str, flags: dict[str, str]) -> list[str]:
    """Return the command line of a small run with a teacher and further flags."""
    return [word for pair in (SMALL | {"--distillation.teacher": teacher} | flags).items() for word in pair]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is not the policy."""
    return str(other_model(tmp_path_factory.mktemp("models") / "teacher", scale=0.3))


@pytest.mark.parametrize("loss", ["reverse_kl", pytest.param("forward_kl", marks=pytest.mark.slow)])
def test_a_run_learns_from_its_teacher_and_resumes_bit_for_bit(loss: str, teacher: str, tmp_path: Path) -> None:
    """No reward is learned, so that every group is trained on; a run that was interrupted ends with equal weights."""
    flags = words(teacher, {"--distillation.loss": loss})
    whole = run(tmp_path / "whole", *flags, "--steps", "3", small=())
    assert whole.status == 0, whole.err
    assert (whole.accounting.trained, whole.accounting.discarded) == (12, 0)
    found = metrics(tmp_path / "whole")
    assert all(line["distillation/kl"] > 0 for line in found)
    assert all(line["distillation/teacher_logprob"] < 0 < line["distillation/seconds"] for line in found)
    assert [line["distillation_loss"] is None for line in found] == [loss == "reverse_kl"] * 3
    assert {line["distillation/failed"] for line in found} == {line["distillation/retries"] for line in found} == {0}
    assert [one for line in found for one in line["findings"]] == []
    assert "KL to the teacher" in " ".join(attachment.shown(found[-1]))
    resumed = continued(tmp_path / "whole", tmp_path / "run", *flags, "--steps", "3", step=2)
    assert resumed == adapter(tmp_path / "whole")


@pytest.mark.slow  # three runs in processes of their own
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_killed_run_resumes_bit_for_bit(step: int, teacher: str, tmp_path: Path) -> None:
    """Beside rewards, from a teacher that is asked again."""
    flags = words(teacher, {"--distillation.beside-rewards": "true", "--steps": "4"})
    assert run(tmp_path / "whole", *flags, small=()).status == 0
    assert killed_and_continued(tmp_path / "run", *flags, step=step) == adapter(tmp_path / "whole")


@pytest.fixture
def server() -> Iterator[TeacherServer]:
    """A server that encodes no text as the policy does, unless a test says otherwise."""
    made = TeacherServer()
    yield made
    made.close()


def test_groups_that_the_teacher_cannot_score_are_discarded_and_counted(
    server: TeacherServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the reason of failed rewards; the run ends when the teacher fails for whole batches in a row."""
    monkeypatch.setattr("attachments.distillation.attachment.findings_when_loaded", lambda *_: ())
    server.answer = lambda body: (400, {"error": "no"})
    flags = words(server.url, {"--steps": "9", "--learner.max-failed-batches": "2"})
    result = run(tmp_path / "run", *flags, small=())
    assert result.status == 1
    assert (result.accounting.trained, result.accounting.discarded) == (0, 8)
    assert [line["distillation/failed"] for line in metrics(tmp_path / "run")] == [4, 4]
    assert {line["reason"] for line in lines(tmp_path / "run" / "rollouts.jsonl")} == {"reward_error"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("learner.distillation-weight", "0", "learner.distillation_weight"),
        ("sampling.temperature", "0.7", "sampling.temperature"),
        ("learner.objective", "sft", "learner.objective"),
        ("distillation.top-k", "3", "distillation.top_k"),
        ("distillation.timeout-seconds", "3", "distillation.timeout_seconds"),
        ("learner.objective.advantage", "mean", "learner.objective.advantage"),
        ("learner.kl-penalty", "reward", "learner.kl_penalty"),
        ("distillation.teacher", "", "learner.distillation_weight"),
        ("distillation.teacher", "nowhere/at-all", "nowhere/at-all"),
        ("distillation.teacher", "http://127.0.0.1:9", "cannot be reached"),
    ],
)
def test_settings_that_cannot_work_are_refused(key: str, value: str, said: str, teacher: str, tmp_path: Path) -> None:
    """With the key, and before anything is trained."""
    result = run(tmp_path / "run", *words(teacher, {"--steps": "1", f"--{key}": value}), small=())
    assert result.status == 2
    assert said in result.err
    assert not (tmp_path / "run").exists()


def test_a_server_with_another_tokenizer_is_refused(server: TeacherServer, tmp_path: Path) -> None:
    """In one line, before anything is trained."""
    result = run(tmp_path / "run", *words(server.url, {"--steps": "1"}), small=())
    assert result.status == 2
    assert "another tokenizer" in result.err
    assert not (tmp_path / "run").exists()


def test_the_estimate_of_memory_counts_the_teacher() -> None:
    """Its weights; a teacher behind a server takes none."""

    def base(path: str) -> int:
        profile = load_profile("local-m3", {"distillation.teacher": path, "learner.distillation_weight": 1.0})
        return estimate_memory(profile.model, profile).base

    weights = (EMBEDDED / "model.safetensors").stat().st_size
    assert base(str(EMBEDDED)) - base("http://127.0.0.1:9") == pytest.approx(weights, rel=0.05)


def test_a_teacher_alone_needs_no_rewards(teacher: str) -> None:
    """The policy as its own teacher, and a teacher beside rewards, need them."""
    settings = {"distillation.teacher": teacher, "learner.distillation_weight": 1.0, "rewards": []}
    assert load_profile("local-m3", settings).rewards == ()
    for other in ({"distillation.teacher": "@policy"}, {"distillation.beside_rewards": True}):
        with pytest.raises(ProfileError, match="reward"):
            load_profile("local-m3", settings | other)
