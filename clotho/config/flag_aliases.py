"""Short flags, and the names that earlier trainers gave to the same settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct


class Alias(Struct, frozen=True, kw_only=True):
    """A flag that sets other keys: those of `keys` that `settings` makes of the text it is given.

    note: where the meaning needs a word.
    """

    name: str
    keys: tuple[str, ...]
    note: str
    settings: Callable[[str], dict[str, str]]


class Constant(Struct, frozen=True, kw_only=True):
    """A switch that sets keys to fixed values: `when_true` if bare or true; `when_false` (None = refused) if false."""

    name: str
    when_true: dict[str, Any]
    when_false: dict[str, Any] | None
    note: str


def _alias(name: str, *keys: str, note: str = "", settings: Callable[[str], dict[str, str]] | None = None) -> Alias:
    return Alias(name=name, keys=keys, note=note, settings=settings or (lambda text: dict.fromkeys(keys, text)))


def _kl_estimator(text: str) -> dict[str, str]:
    return {"learner.kl_estimator": "k2" if text == "mse" else text}


def _ref_ema(text: str) -> dict[str, str]:
    """An average that keeps all of itself is the policy that the run began with."""
    if text in ("1", "1.0"):
        return {"learner.reference": "base"}
    return {"learner.reference": "average", "learner.ref_ema": text}


ALIASES = (
    _alias("model", "model.path"),
    _alias("model-path", "model.path"),
    _alias("model-name", "model.path"),
    _alias("dataset", "data.train", note="the held-out problems are then set aside from it"),
    _alias("dataset-path", "data.train", note="as --dataset"),
    _alias("train-dataset-path", "data.train", note="as --dataset"),
    _alias("val-dataset-path", "data.heldout"),
    _alias("num-iters", "steps"),
    _alias("total-steps", "steps"),
    _alias("training-steps", "steps"),
    _alias("num-training-steps", "steps"),
    _alias("batch-size", "learner.batch_size"),
    _alias("group-size", "sampling.group_size"),
    _alias("token-budget", "learner.micro_batch_tokens"),
    _alias("max-tokens", "sampling.max_tokens"),
    _alias("temperature", "sampling.temperature"),
    _alias("learning-rate", "learner.learning_rate"),
    _alias("lr", "learner.learning_rate"),
    _alias("lora-rank", "policy.rank"),
    _alias("lora-r", "policy.rank"),
    _alias("lora-scale", "policy.scale"),
    _alias("lora-alpha", "policy.alpha"),
    _alias("lora-dropout", "policy.dropout"),
    _alias("lora-layers", "policy.num_layers"),
    _alias("num-batches-ahead", "rollouts.max_batches_ahead"),
    _alias("kl-beta", "learner.kl_beta"),
    _alias("beta", "learner.kl_beta"),
    _alias("kl-estimator", "learner.kl_estimator", note="mse is k2", settings=_kl_estimator),
    _alias("clip-ratio", "learner.clip_low", "learner.clip_high", note="both sides"),
    _alias("epsilon", "learner.clip_low", "learner.clip_high", note="of the clip; AdamW's is learner.epsilon"),
    _alias("entropy-weight", "learner.entropy_weight"),
    _alias(
        "ref-ema",
        "learner.ref_ema",
        "learner.reference",
        note='the reference is a moving average; 1.0: learner.reference = "base"',
        settings=_ref_ema,
    ),
    _alias("update-epochs", "learner.update_epochs"),
    _alias("adapter-path", "checkpoint.adapter_path"),
    _alias("checkpoint-interval", "checkpoint.interval"),
    _alias("output-dir", "run_dir"),
    _alias("host", "server.host"),
    _alias("port", "server.port"),
)

CONSTANTS = (
    Constant(
        name="disable-async", when_true={"async": False}, when_false={"async": True}, note="the strictly on-policy loop"
    ),
    Constant(
        name="save-every-step", when_true={"checkpoint.interval": 1}, when_false=None, note="checkpoint.interval = 1"
    ),
)

ELSEWHERE: Mapping[str, str] = {
    "config": "a configuration file is given with --profile",
    "gradient-accumulation-steps": "use --learner.micro-batch-tokens; any split gives the same gradient",
    "adapter-format": "adapters are always safetensors, as mlx-lm writes them",
    "checkpoint-dir": "checkpoints are in RUN_DIR/checkpoints; use --run-dir",
    "server-url": "the server is part of the run; use --server.port",
    "lora-target-modules": "use --policy.target-modules with block-relative names such as self_attn.q_proj",
    "lora-path": "the base model is given with --model; a run is continued with --resume",
    "save-path": "everything a run writes is in RUN_DIR; use --run-dir",
    "seq-len": "prompts are never cut, and completions are bounded by --max-tokens",
    "diverse-mode": "the completions of a group have a seed each",
    "dataset-name": "a dataset is a local file of JSON lines; use --dataset",
    "dataset-config": "a dataset is a local file of JSON lines; use --dataset",
    **dict.fromkeys(
        ("reward-content-type", "reward-format-weight", "reward-content-weight"),
        """rewards and their weights are listed: --rewards '[{name = "format", weight = 0.2}, ...]'""",
    ),
}
"""Names that earlier trainers used for what is done differently here, and what to do instead."""
