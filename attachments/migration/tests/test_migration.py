"""The command `import-profile`: files of an earlier system and of mlx_lm.lora become profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.migration.earlier_profiles import import_profile
from attachments.migration.other_trainers import by_name
from protocols.errors import ProfileError
from training_run.__main__ import main
from training_run.profile.load import load_profile

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


LORA_CONFIG = """
model: mistralai/Mistral-7B-v0.1
train: true
fine_tune_type: dora
optimizer: adamw
optimizer_config:
  adam: {}
  adamw:
    betas: [0.9, 0.98]
    weight_decay: 0.05
    bias_correction: true
data: /path/to/training/data
seed: 3
num_layers: 2
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
resume_adapter_file: null
adapter_path: adapters
save_every: 100
test: false
mask_prompt: false
grad_checkpoint: true
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 16
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 100
  arguments: [2e-5, 1000, 1e-7]
"""


@pytest.mark.parametrize("text", [ATROPOS_RUN, LOCAL_RUN], ids=["environments", "own data"])
def test_an_imported_profile_passes_a_dry_run(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also keys with the value `null`, which is not TOML. An existing file is never overwritten."""
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(text)
    assert main(["import-profile", str(old), str(new)]) == 0
    assert main(["import-profile", str(old), str(new)]) == 2
    model = str(Path(__file__).parents[3] / "profiles" / "embedded")
    monkeypatch.chdir(tmp_path)
    assert main(["--profile", "new.toml", "--model", model, "--dry-run"]) == 0


def test_an_imported_profile_has_the_settings_of_the_old_file() -> None:
    """Settings without a counterpart are reported; values that change nothing are not."""
    found = import_profile(ATROPOS_RUN, "old.toml")
    assert found.extends == "atropos"
    assert found.settings == {
        "server.port": 8000, "server.host": "127.0.0.1", "engine.max_num_seqs": 8, "server.max_concurrent": 100,
        "model.path": "NousResearch/Hermes-4-Qwen3-14B-1-e3", "learner.objective.type": "grpo",
        "learner.optimizer.learning_rate": 1e-5, "learner.batch_size": 32, "learner.update_epochs": 4,
        "learner.kl_penalty.coef": 0.05, "learner.entropy_bonus.coef": 0.01, "learner.objective.clip_low": 0.2,
        "learner.objective.clip_high": 0.2, "steps": 10000, "checkpoint.interval": 500, "policy.method.type": "lora",
        "policy.method.rank": 16, "policy.method.alpha": 32, "policy.method.dropout": 0.05,
        "policy.method.target_modules": ("q_proj", "v_proj", "k_proj", "o_proj"), "atropos.type": "connect",
        "atropos.url": "http://localhost:8001", "tracking.group": "qwen3-gsm8k", "atropos.max_tokens": 2048,
    }  # fmt: skip
    left = {sentence.split(" = ")[0].rpartition(".")[2] for sentence in found.left}
    assert left == {"rollout_batch_size", "lock_timeout_ms"}
    local = import_profile(LOCAL_RUN, "old.toml")
    assert (local.extends, local.settings["checkpoint.interval"], local.left) == ("local-m3", 1, ())
    assert local.settings["learner.entropy_bonus.type"] == "off"


def test_a_configuration_of_mlx_lm_becomes_a_profile(tmp_path: Path) -> None:
    """Every key of mlx_lm.lora that means the same; the others are named. The file itself is a profile too."""
    found = import_profile(LORA_CONFIG, "lora_config.yaml")
    assert (found.extends, [sentence.split()[0] for sentence in found.left]) == ("qwen3-m3", ["val_batches"])
    assert found.settings == {
        "model.path": "mistralai/Mistral-7B-v0.1", "policy.method.type": "dora", "learner.optimizer.type": "adamw",
        "learner.optimizer.beta1": 0.9, "learner.optimizer.beta2": 0.98, "learner.optimizer.weight_decay": 0.05,
        "data.train": "/path/to/training/data", "seed": 3, "policy.method.num_layers": 2, "learner.batch_size": 4,
        "steps": 1000, "learner.optimizer.learning_rate": 2e-5, "eval.interval": 200, "checkpoint.interval": 100,
        "checkpoint.adapter_path": "adapters", "policy.grad_checkpoint": True, "policy.method.rank": 16,
        "policy.method.target_modules": ("self_attn.q_proj", "self_attn.v_proj"), "policy.method.scale": 20.0,
        "policy.method.dropout": 0.0, "learner.schedule.type": "cosine", "learner.schedule.warmup_steps": 100,
        "learner.schedule.min_learning_rate": 1e-7,
    }  # fmt: skip
    (tmp_path / "lora.yaml").write_text(LORA_CONFIG)
    profile = load_profile(str(tmp_path / "lora.yaml"))
    assert (profile.steps, profile.policy.method.__struct_config__.tag) == (1000, "dora")


def test_every_key_of_mlx_lm_is_in_the_table() -> None:
    """The defaults of the installed version, and the keys of its documentation."""
    from mlx_lm.lora import CONFIG_DEFAULTS

    tables = {"optimizer_config", "lora_parameters", "lr_schedule"}
    assert CONFIG_DEFAULTS.keys() - tables <= by_name().keys()
    assert {f"lora_parameters.{key}" for key in ("keys", "rank", "scale", "dropout")} <= by_name().keys()


@pytest.mark.parametrize("text", ["a: &x [1]\nb: *x", "a: [1", "text", "1: 2", "- a", "[" * 500 + "]" * 500])
def test_yaml_that_is_no_configuration_is_refused(text: str) -> None:
    """Aliases too, which can stand for far more than the file has."""
    with pytest.raises(ProfileError, match=r"^lora\.yaml: "):
        import_profile(text, "lora.yaml")


def test_paths_of_an_old_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and adapter alike, in the imported profile and when the old file itself is the profile."""
    old = tmp_path / "old" / "run.toml"
    old.parent.mkdir()
    old.write_text('[model]\nbase_path = "./m"\nlora_path = "adapter/a.npz"\n[rl_training]\nsteps = 9\n')
    monkeypatch.chdir(tmp_path)
    assert main(["import-profile", str(old), "new.toml"]) == 0
    for profile in (load_profile("new.toml"), load_profile(str(old))):
        assert profile.model.path == str(old.parent / "m")
        assert profile.policy.adapter == str(old.parent / "adapter" / "a.npz")
        assert profile.steps == 9


@pytest.mark.parametrize("words", [[], ["a", "b", "c"], ["nowhere.toml"], ["--flag"]], ids=" ".join)
def test_an_import_that_is_not_possible_is_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The exit status is 2."""
    assert main(["import-profile", *words]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_an_unknown_key_is_reported() -> None:
    """A key of no earlier system is a comment of the profile."""
    found = import_profile("[rl_training]\nlearning_rte = 1e-5\n", "old.toml")
    assert (len(found.left), found.settings) == (1, {})
