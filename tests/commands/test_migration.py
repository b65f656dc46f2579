"""Migration: every row of the tables of earlier systems works, and TOML files of an earlier system become profiles."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from clotho.__main__ import main
from clotho.commands.migration import import_profile
from clotho.config.flags import parse_arguments
from clotho.config.keys import KEYS, SECTIONS
from clotho.config.load import load_profile
from clotho.config.other_trainers import Row, accepted, systems
from protocols.errors import ProfileError

ROWS = [(system.name, row) for system in systems() for row in system.row]
TRIED = [pytest.param(row, id=f"{name} {row.old}") for name, row in ROWS if row.new]

ATROPOS_RUN = """
[server]
port = 8000
host = "127.0.0.1"
batch_size = 8
max_concurrent_requests = 100
[model]
base_path = "NousResearch/Hermes-4-Qwen3-14B-1-e3"
[rl_training]
algorithm = "grpo"
learning_rate = 1e-5
batch_size = 32
update_epochs = 4
kl_beta = 0.05
entropy_weight = 0.01
clip_ratio = 0.2
total_steps = 10000
checkpoint_interval = 500
[rl_training.lora]
enabled = true
rank = 16
alpha = 32
dropout = 0.05
target_modules = ["q_proj", "v_proj", "k_proj", "o_proj"]
[rl_training.atropos]
api_url = "http://localhost:8001"
wandb_group = "qwen3-gsm8k"
rollout_batch_size = 128
max_token_length = 2048
[rl_training.weight_updates]
update_every_n_steps = 1
lock_timeout_ms = 100
"""
LOCAL_RUN = """
[server]
port = 8000
[model]
base_path = "mlx-community/Llama-3.2-3B-Instruct-4bit"
lora_path = null  # no adapter
[rl_training]
algorithm = "grpo"
learning_rate = 1e-5
batch_size = 8
steps = 1000
entropy_weight = 0.0
checkpoint_interval = 100
save_every_step = true
atropos_url = null
[rl_training.lora]
num_layers = 2
target_modules = ["self_attn.q_proj", "self_attn.v_proj"]
"""


@pytest.mark.parametrize("row", TRIED)
def test_the_counterpart_of_every_flag_is_a_valid_command_line(row: Row) -> None:
    """With the example values of the table."""
    arguments = parse_arguments(row.new)
    load_profile(arguments.profile, arguments.overrides)


@pytest.mark.slow
@pytest.mark.parametrize("row", TRIED)
def test_the_counterpart_of_every_flag_passes_a_dry_run(row: Row, tmp_path: Path) -> None:
    """The dataset, the memory and the profile are checked as before a run."""
    run_dir = () if "--run-dir" in row.new else ("--run-dir", str(tmp_path / "run"))
    assert main([*row.new, "--dry-run", *run_dir]) == 0


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{name} {row.old}") for name, row in ROWS if row.old.startswith("--") and row.new]
)
def test_an_old_flag_is_accepted_with_the_same_meaning_or_refused(row: Row) -> None:
    """A flag that the table calls accepted sets what its counterpart sets; no old flag sets anything else."""
    flag, *value = shlex.split(row.old.split(",")[0])
    words = [flag, *(value or row.new[-1:])]
    try:
        found = parse_arguments(words).overrides
    except ProfileError:
        assert row.names[0] not in accepted()
        return
    expected = parse_arguments(row.new).overrides
    assert found.items() <= expected.items()


def test_toml_keys_have_counterparts_that_exist() -> None:
    """A renamed key here would otherwise end every import."""
    for _, row in ROWS:
        for key in (*row.keys, *(key for found in row.values.values() for key in found)):
            assert key in KEYS or key in SECTIONS, row.old


@pytest.mark.parametrize("text", [ATROPOS_RUN, LOCAL_RUN], ids=["environments", "own data"])
def test_an_imported_profile_passes_a_dry_run(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also keys with the value `null`, which is not TOML. An existing file is never overwritten."""
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(text)
    assert main(["import-profile", str(old), str(new)]) == 0
    assert main(["import-profile", str(old), str(new)]) == 2
    model = str(Path(__file__).parents[2] / "profiles" / "embedded")
    monkeypatch.chdir(tmp_path)
    assert main(["--profile", "new.toml", "--model", model, "--dry-run"]) == 0


def test_an_imported_profile_has_the_settings_of_the_old_file() -> None:
    """Settings without a counterpart are reported; values that change nothing are not."""
    found = import_profile(ATROPOS_RUN, "old.toml")
    profile = tomllib.loads(found.text)
    assert profile["extends"] == "atropos"
    assert profile["atropos"] == {"url": "http://localhost:8001", "max_tokens": 2048}
    assert profile["learner"]["objective"] == {"clip_low": 0.2, "clip_high": 0.2} | profile["learner"]["objective"]
    assert profile["learner"]["kl_penalty"] == {"coef": 0.05}
    assert profile["policy"]["method"]["alpha"] == 32
    assert (profile["steps"], profile["engine"]["max_num_seqs"]) == (10000, 8)
    left = {sentence.split(" = ")[0].rpartition(".")[2] for sentence in found.left}
    assert left == {"rollout_batch_size", "lock_timeout_ms"}
    local = tomllib.loads(import_profile(LOCAL_RUN, "old.toml").text)
    assert (local["extends"], local["checkpoint"]["interval"]) == ("local-m3", 1)
    assert "entropy_bonus" not in local["learner"]


@pytest.mark.parametrize("words", [[], ["a", "b", "c"], ["nowhere.toml"], ["--flag"]], ids=" ".join)
def test_an_import_that_is_not_possible_is_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The exit status is 2."""
    assert main(["import-profile", *words]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_an_unknown_key_is_reported() -> None:
    """A key of no earlier system is a comment of the profile."""
    found = import_profile("[rl_training]\nlearning_rte = 1e-5\n", "old.toml")
    assert len(found.left) == 1
    assert tomllib.loads(found.text) == {"extends": "local-m3"}
