"""Bad input ends with one line on stderr and exit status 2 and changes no file."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from protocols.errors import visible
from tests.e2e.conftest import CompletedRun
from tests.e2e.pipeline_process import FEW_PROBLEMS, PROBLEMS, REPOSITORY, SMALL, run
from training_run.__main__ import main
from training_run.directory.run_directory import open_run
from training_run.main import PreparedRun, prepare
from training_run.profile.flags import parse_arguments
from training_run.profile.load import load_profile
from training_run.records.failure_report import COMPLAINT_LIMIT

TRAIN = REPOSITORY / "profiles" / "embedded" / "train.jsonl"

Complaint = Callable[..., str]


def contents(directory: Path) -> dict[str, bytes | None]:
    """Return all files below a directory except lock files."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.name != ".lock"
    }


@pytest.fixture
def error_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Complaint:
    """Run the program with wrong flags and return its one error line."""

    def error_line_fixture(*flags: str, port: int = 0, run_dir: str = "run") -> str:
        before = contents(tmp_path)
        problems = () if any(flag.startswith(("--data", "--profile", "--resume")) for flag in flags) else FEW_PROBLEMS
        status = main(["--run-dir", str(tmp_path / run_dir), "--server.port", str(port), *problems, *flags])
        out, err = capfd.readouterr()
        assert (status, out.startswith("loading ") * out) == (2, out), err
        assert err.startswith("clotho: ")
        assert err.count("\n") == 1, err
        assert visible(err.removesuffix("\n"), COMPLAINT_LIMIT) + "\n" == err
        assert contents(tmp_path) == before
        return err

    return error_line_fixture


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--profile", "local-m4"], ["local-m4", "local-m3"]),
        (["--learner.learning-rte", "1e-3"], ["--learner.learning-rte", "--learner.optimizer.learning-rate"]),
        (["--steps", "0"], ["--steps", ">= 1"]),
        (["--model", "/no/such/model"], ["/no/such/model", "does not exist"]),
        (["--dataset", "/no/such/file.jsonl"], ["/no/such/file.jsonl", "does not exist"]),
        (["--data.heldout", "/no/such/file.jsonl"], ["/no/such/file.jsonl", "does not exist"]),
        (["--clean", "--model", "/no/such/model"], ["/no/such/model"]),
        (["--resume", "--clean"], ["--resume", "--clean"]),
    ],
)
def test_invalid_flags_are_named(error_line: Complaint, flags: list[str], says: list[str]) -> None:
    """With the nearest valid name or the range."""
    line = error_line(*flags)
    for part in says:
        assert part in line


HOSTILE = "\x1b[2J\x9b\u202e\n"


@pytest.mark.parametrize(
    "flags",
    [
        [f"--{HOSTILE}"],
        ["--profile", HOSTILE],
        ["--model", HOSTILE],
        ["--dataset", HOSTILE],
        ["--dataset", "x" * 5000],
        ["--learner.objective.type", HOSTILE],
    ],
)
def test_hostile_flags_are_shown_as_one_visible_line(error_line: Complaint, flags: list[str]) -> None:
    """Terminal escapes, line breaks and changes of writing direction are escaped, and long text is shortened."""
    error_line(*flags)


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ({f"key{i}": 0 for i in range(100_000)}, "mine.jsonl:1: has 100000 keys"),
        ({"k" * 5_000_000: 0}, "data.prompt_key"),
        ({HOSTILE: 0}, "data.prompt_key"),
    ],
    ids=["many keys", "long key", "hostile key"],
)
def test_hostile_records_of_a_dataset_are_shown_as_one_visible_line(
    tmp_path: Path, error_line: Complaint, record: dict[str, int], part: str
) -> None:
    """A record without the prompt is described by its keys, which can be long or many."""
    dataset = tmp_path / "mine.jsonl"
    dataset.write_text(json.dumps(record))
    assert part in error_line("--dataset", str(dataset))


def test_a_malformed_line_of_a_dataset_is_named(tmp_path: Path, error_line: Complaint) -> None:
    """With file and line: line 731 after 730 valid ones."""
    dataset = tmp_path / "mine.jsonl"
    dataset.write_text("\n".join([*TRAIN.read_text().splitlines()[:730], '{"prompt": "1 + 1"', '{"prompt": "2"}']))
    assert f"{dataset}:731: " in error_line("--dataset", str(dataset))


def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path, error_line: Complaint) -> None:
    """The message has both lengths."""
    dataset = tmp_path / "mine.jsonl"
    problems = [{"prompt": "1 + 1", "answer": "2"}] * 20 + [{"prompt": "1 + " * 2000 + "1", "answer": "2001"}]
    dataset.write_text("\n".join(map(json.dumps, problems)))
    line = error_line("--dataset", str(dataset))
    assert "1024" in line
    assert "longest prompt" in line


def test_a_port_in_use_is_refused(error_line: Complaint) -> None:
    """The message names the flag for another port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_line(port=port)
    assert f"port {port}" in line
    assert "already in use" in line


def test_the_directory_of_another_run_is_refused(tmp_path: Path, finished: CompletedRun, error_line: Complaint) -> None:
    """The message names --resume and --clean. Neither is possible while another process uses the directory."""
    shutil.copytree(finished.run_dir, tmp_path / "run")
    line = error_line()
    assert "--resume" in line
    assert "--clean" in line
    holder = open_run(tmp_path / "run", resume=True, clean=False)
    for flags in ([], ["--resume"], ["--clean"]):
        assert f"in use by process {os.getpid()}" in error_line(*flags)
    holder.close()
    assert "/no/such/model" in error_line("--clean", "--model", "/no/such/model")


def test_a_run_resumes_only_with_the_same_rank_model_and_dataset(
    tmp_path: Path, finished: CompletedRun, error_line: Complaint
) -> None:
    """The difference is named, also if only the contents of a file changed."""
    shutil.copytree(finished.run_dir, tmp_path / "run")
    resume = ("--resume", *SMALL[2:], "--steps", "6", "--checkpoint.interval", "2")
    line = error_line(*resume, "--policy.method.rank", "8")
    assert "policy.method.rank: 16 -> 8" in line
    assert f"--profile {tmp_path / 'run' / 'profile.toml'} --resume" in line
    assert "--clean" not in line
    model = tmp_path / "model"
    shutil.copytree(REPOSITORY / "profiles" / "embedded", model)
    line = error_line(*resume, "--model", str(model))
    assert "model.path: " in line
    assert f" -> {model}" in line
    dataset = tmp_path / "mine.jsonl"
    shutil.copy(PROBLEMS / "train.jsonl", dataset)
    other = [str(dataset) if flag == str(PROBLEMS / "train.jsonl") else flag for flag in resume]
    assert f"-> {dataset}" in error_line(*other)


def test_a_resumed_run_prints_its_step(tmp_path: Path, finished: CompletedRun) -> None:
    """The profile in the run directory is used for all settings."""
    shutil.copytree(finished.run_dir, tmp_path / "run")
    profile = tmp_path / "run" / "profile.toml"
    result = run(tmp_path / "run", "--profile", str(profile), "--resume")
    assert result.status == 0, result
    assert f"resumed from the checkpoint of step {finished.steps}" in " ".join(result.out.split())
    events = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "run_resumed"] == [finished.steps]


def test_a_missing_run_is_not_resumed(tmp_path: Path, error_line: Complaint) -> None:
    """The message names the nearest run in the same directory, or how to start a run."""
    assert "start a new run without --resume" in error_line("--resume")
    (tmp_path / "runs").mkdir()
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "profile.toml").touch()
    line = error_line("--resume", run_dir="runs/frist")
    assert str(tmp_path / "runs" / "frist") in line
    assert f"did you mean {tmp_path / 'runs' / 'first'}?" in line


def test_a_trained_adapter_is_not_overwritten_by_another_run(
    tmp_path: Path, finished: CompletedRun, error_line: Complaint
) -> None:
    """The refusal precedes training. The run that wrote the adapter may resume and write it again."""
    shutil.copytree(finished.run_dir / "adapters", tmp_path / "mine")
    line = error_line("--checkpoint.adapter-path", str(tmp_path / "mine"))
    for part in (str(tmp_path / "mine"), "checkpoint.adapter_path"):
        assert part in line
    shutil.copytree(finished.run_dir, tmp_path / "run")
    prepared = prepare(
        [
            "--profile",
            str(tmp_path / "run" / "profile.toml"),
            "--run-dir",
            str(tmp_path / "run"),
            "--resume",
            "--checkpoint.adapter-path",
            str(tmp_path / "mine"),
        ]
    )
    assert isinstance(prepared, PreparedRun)
    prepared.close()


def test_an_unreachable_hub_names_an_offline_profile(error_line: Complaint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a closed port."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    line = error_line("--model", "some/repo")
    for part in ("some/repo", "could not be reached", "local-m3"):
        assert part in line


@pytest.mark.parametrize("shown", [[], ["full"]], ids=["changed", "full"])
def test_a_dry_run_prints_settings_that_load_to_the_same_profile(
    shown: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Flags included: the settings that differ from the defaults, or with `full` all of them. Nothing is written."""
    flags = ["--run-dir", str(tmp_path / "run"), "--steps", "7", "--policy.method.rank", "3", *FEW_PROBLEMS]
    status = main([*flags, "--dry-run", *shown])
    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    settings, _, estimate = out.partition("\nestimated memory")
    assert "total" in estimate
    assert not list(tmp_path.iterdir())
    resolved = tomllib.loads(settings)
    assert (resolved["steps"], resolved["policy"]["method"]["rank"]) == (7, 3)
    assert ("dropout" in resolved["policy"]["method"]) == bool(shown)
    (tmp_path / "again.toml").write_text(settings)
    assert load_profile(str(tmp_path / "again.toml")) == load_profile("local-m3", parse_arguments(flags).overrides)


USER_CODE = """
def excited(completions, excitement, **kwargs):
    return [1.0 for _ in completions]

def broken(logp_N):
    return logp_N

NOT_A_FUNCTION = 1
"""


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--rewards", "nope"], "nope"),
        (["--rewards", "CODE:excitd"], "excitd"),
        (["--rewards", "missing_rewards.py:f"], "missing_rewards.py"),
        (["--rewards", "CODE:excited"], "excitement"),
        (["--learner.objective", "user_code:nothing"], "nothing"),
        (["--learner.objective", "user_code:broken"], "broken"),
        (["--actors", "[{name = 'a', factory = 'user_code:Nothing', mode = 'add'}]"], "Nothing"),
        (["--actors", "[{name = 'a', factory = 'user_code:NOT_A_FUNCTION', mode = 'add'}]"], "NOT_A_FUNCTION"),
    ],
    ids=["reward", "function", "file", "column", "objective", "signature", "actor", "no class"],
)
def test_a_dry_run_refuses_the_users_code_as_the_start_does(
    flags: list[str], names: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same line, with the same exit status, before anything is printed."""
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "user_code.py"
    code.write_text(USER_CODE)
    words = [word.replace("CODE", str(code)) for word in flags]
    words += ["--run-dir", str(tmp_path / "run"), "--server.port", "0", *FEW_PROBLEMS]
    assert main([*words, "--dry-run"]) == 2
    out, refused = capfd.readouterr()
    assert out == ""
    assert names in refused
    assert refused.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert main(words) == 2
    assert capfd.readouterr().err == refused
