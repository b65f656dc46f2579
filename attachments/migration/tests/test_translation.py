"""Command lines of the earlier systems: each of them runs, or is refused once, with the command line that runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from attachments.files import convert as conversion
from attachments.files import merge, show
from attachments.migration.other_trainers import EARLIER, SYSTEMS, VALUE, Row, by_name, table
from attachments.migration.tests.earlier_command_lines import LINES, Documented
from attachments.migration.tests.test_migration import ATROPOS_RUN, LOCAL_RUN, LORA_CONFIG
from attachments.migration.translation import Given, replaced_program
from protocols.errors import ProfileError
from tests.training_run.profile.test_flags import example
from training_run.profile.command_profiles import load_serving
from training_run.profile.flags import parse_arguments, problem_of
from training_run.profile.keys import PROFILE_KEYS
from training_run.profile.load import load_profile

WHOLE = "the whole command line: clotho "


COMPLETE = [line for line in LINES if not line.part]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory from which the documents start their commands."""
    (tmp_path / "train_configs").mkdir()
    for name in ("train_configs/grpo_qwen3.toml", "train_configs/grpo_qwen3_lora.toml"):
        (tmp_path / name).write_text(ATROPOS_RUN, encoding="utf-8")
    (tmp_path / "train_config.toml").write_text(LOCAL_RUN, encoding="utf-8")
    (tmp_path / "lora_config.yaml").write_text(LORA_CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def start(words: Sequence[str]) -> None:
    """Read a command line of Clotho as the program does. Raises ProfileError."""
    match words:
        case ["serve", *flags]:
            load_serving(flags)
        case ["merge" | "convert" | "show" as name, *flags]:
            module = {"merge": merge, "convert": conversion, "show": show}[name]
            module.parser().parsed(flags, Console(file=StringIO()))
        case _:
            arguments = parse_arguments(words)
            load_profile(arguments.profile, arguments.overrides)


def paste(words: Sequence[str]) -> None:
    """Read a command line of an earlier program as the program does. Raises ProfileError."""
    found = replaced_program(words, problem_of)
    start(words if found is None else found)


def refusal(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The refused flags of a command line, and the words of the whole command line that replaces it."""
    try:
        paste(words)
    except ProfileError as error:
        *flags, whole = getattr(error, "__notes__", [])
        return [note.split()[0].rstrip(":") for note in flags or [str(error)]], shlex.split(whole.removeprefix(WHOLE))
    return [], []


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.words)[:90])
def test_a_documented_command_line_runs_or_is_refused_with_one_that_runs(
    line: Documented, capsys: pytest.CaptureFixture[str]
) -> None:
    """All refused flags are named at once. What replaces the whole command line has no other trainer's flag."""
    refused, whole = refusal(line.words)
    assert refused == list(line.refused)
    capsys.readouterr()
    if refused and VALUE not in whole:
        start(whole)
        assert "in the words of Clotho" not in capsys.readouterr().err


@pytest.mark.parametrize("line", COMPLETE, ids=lambda line: " ".join(line.words)[:90])
def test_the_flags_alone_are_recognized(line: Documented) -> None:
    """Without the earlier program, behind the command of Clotho: its system is the one that has all flags."""
    if "--" not in line.text or (line.system and "mlx_lm.lora" not in line.text):
        return
    found = {"mlx_parallm_serve": "serve", "vllm_api_server.py": "serve", "mlx_parallm_merge_lora": "merge"}
    command = [new for old, new in found.items() if old in line.text]
    refused, whole = refusal([*command, *line.flags])
    assert set(refused) <= {*line.refused, "--weight-bridge-mode"}
    if refused and VALUE not in whole:
        start(whole)


ROWS = [
    pytest.param(row, name, id=f"{name} {row.value} {row.command} {row.program}".strip())
    for name, rows in by_name().items()
    for row in rows
]


def written(row: Row) -> Given:
    """A flag of a row with the example value of the table, or with a value that its key takes."""
    if row.example is not None:
        return Given(flag="--any", values=tuple(shlex.split(row.example)))
    return Given(flag="--any", values=(example_of(row),) if "{}" in row.new else ())


def example_of(row: Row) -> str:
    """A value that the last key of a replacement takes."""
    key = PROFILE_KEYS.named(row.keys[-1]) if row.keys else None
    return example(key) if key else "local-m3"


@pytest.mark.parametrize(("row", "name"), ROWS)
def test_every_replacement_of_the_table_is_a_valid_command_line(row: Row, name: str) -> None:
    """With the example value of the row; the row applies to this value."""
    one = written(row)
    assert row.applies(one.text, row.command, row.program)
    words = [example_of(row) if word == VALUE else word for word in row.words(one.text, {name: one.text})]
    if row.command == "serve":
        start(["serve", "--model", "profiles/embedded", *words])
    elif not row.command:
        assert problem_of(words) == ""
        if "." not in name and any(name in row.names(system) for system in EARLIER):
            start(words)


def test_every_row_says_what_to_do() -> None:
    """A row without a replacement has a note, and what the documents of the earlier systems name has an example."""
    for row in table().row:
        assert row.new or row.note or row.accepted, row
        assert set(row.accepted) <= row.systems.keys(), row
        if any(row.names(system) for system in EARLIER):
            assert row.example is not None, row
    assert {one.system for one in table().program} == {*EARLIER, "mlx_lm"} < SYSTEMS.keys()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_name_has_one_row_for_a_value(system: str) -> None:
    """Two rows of a name for one system differ in their condition: command, program or value."""
    for name, named in by_name().items():
        rows = [row for row in named if name in row.names(system)]
        conditions = [(row.command, row.program, row.value) for row in rows]
        assert len(set(conditions)) == len(conditions), name


@pytest.mark.parametrize(
    ("line", "here"),
    [
        ("--beta 0.04", "--learner.kl-penalty.coef 0.04"),
        ("--beta 0", "--learner.kl-penalty off"),
        ("--epsilon 0.1", "--learner.objective.clip-low 0.1 --learner.objective.clip-high 0.1"),
        ("--disable-async", "--async false"),
        ("--save-every-step true", "--checkpoint.interval 1"),
        ("--algorithm grpo", "--learner.objective grpo"),
        ("--ref-ema 0.99", "--learner.kl-penalty.reference average --learner.kl-penalty.reference.decay 0.99"),
        ("--use-wandb", "--trackers wandb"),
        ("--use-wandb --wandb-project p", "--trackers wandb --tracking.project p"),
        ("--output_dir out", "--run-dir out"),
        ("--batch-size 4 --num-iters 9", "--learner.batch-size 4 --steps 9"),
        ("--num-iters 9 --steps 9", "--steps 9"),
    ],
)
def test_a_name_with_one_meaning_is_accepted_with_a_remark(
    line: str, here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It sets what its replacement sets. The replacement stands once, on one line of standard error."""
    found = parse_arguments(line.split())
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("clotho: in the words of Clotho: --")
    assert found == parse_arguments(here.split())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "refused", "here"),
    [
        ("--weight-bridge-mode none", ["--weight-bridge-mode"],
         "--generator remote --generator.server-url http://127.0.0.1:9001 --generator.weights restart "
         "--generator.sync-interval 3"),
        ("--resume d/step_5000", ["--resume"], "--resume --resume-step 5000 --run-dir d"),
        ("--resume runs/x/", ["--resume"], "--resume --run-dir runs/x"),
        ("--batch-size 4", ["--batch-size"], "--learner.batch-size 4"),
        ("--batch-size 4 --world-size 1", ["--batch-size", "--world-size"], "--learner.micro-batch-tokens 8192"),
        ("--algorithm ppo", ["--algorithm"], "--learner.objective VALUE"),
        ("--max-steps 7 --deepspeed x --seed 3", ["--max-steps", "--deepspeed"], "--steps 7 --seed 3"),
    ],
)  # fmt: skip
def test_other_names_are_refused_with_the_words_to_use(line: str, refused: list[str], here: str) -> None:
    """The value and the other flags decide which words."""
    assert refusal(line.split()) == (refused, here.split())


def test_a_name_with_two_meanings_is_refused_with_both() -> None:
    """If no other flag tells the system."""
    with pytest.raises(ProfileError) as caught:
        parse_arguments(["--batch-size", "4"])
    for words in ("use --learner.batch-size 4", "or use --learner.micro-batch-tokens 8192"):
        assert words in str(caught.value)


def test_ranks_are_started_by_mlx_launch() -> None:
    """The replacement precedes the program."""
    with pytest.raises(ProfileError) as caught:
        parse_arguments(["--world-size", "2", "--training-steps", "3"])
    assert caught.value.__notes__ == ["the whole command line: mlx.launch -n 2 --backend ring -- clotho --steps 3"]


def test_a_misspelt_flag_is_named_with_the_others() -> None:
    """There is no whole command line, because nobody knows what it would be."""
    with pytest.raises(ProfileError) as caught:
        parse_arguments(["--max-steps", "7", "--frobnicate", "--steps", "x"])
    assert [note.split()[0] for note in caught.value.__notes__] == ["--max-steps", "unknown", "--steps"]


@pytest.mark.parametrize("program", ["run-api", "environments/gsm8k_server.py"])
def test_a_program_that_stays_in_use_is_refused_with_its_use(program: str) -> None:
    """The API server and the environments of Atropos are no part of Clotho."""
    with pytest.raises(ProfileError, match="start it as before"):
        replaced_program(["uv", "run", program, "serve"], problem_of)


def test_flags_override_a_file_of_an_earlier_system(capsys: pytest.CaptureFixture[str]) -> None:
    """`--config` reads it as `--profile` does. What is not carried over is named."""
    arguments = parse_arguments(["--config", "train_configs/grpo_qwen3.toml", "--learning-rate", "3e-5"])
    profile = load_profile(arguments.profile, arguments.overrides)
    assert (profile.steps, profile.learner.optimizer.learning_rate) == (10000, 3e-5)
    assert "not carried over: rl_training.atropos.rollout_batch_size = 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [("--learner.objective ppo", "critic = value_head"), ("--policy.method adalora", "policy.rank_budget")],
)
def test_a_planned_value_is_refused_with_what_exists(line: str, words: str) -> None:
    """Instead of the most similar value."""
    with pytest.raises(ProfileError) as caught:
        parse_arguments(line.split())
    assert words in str(caught.value)
    assert "did you mean" not in str(caught.value)
