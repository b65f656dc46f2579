"""Names of settings in TRL, verl, mlx-lm, mlx-lm-lora and earlier MLX trainers, with the corresponding keys.

An unknown flag is looked up in this table before the nearest name is suggested. The page on coming from other trainers
shows the same table.
"""

from __future__ import annotations

from functools import cache

from msgspec import Struct

SYSTEMS = {
    "trl": "TRL",
    "verl": "verl",
    "mlx_lm": "mlx-lm",
    "mlx_lm_lora": "mlx-lm-lora",
    "earlier": "earlier trainers",
}
"""The columns of the table, with their names in messages."""


class Counterpart(Struct, frozen=True, kw_only=True):
    """One setting, as the systems name it.

    keys: the keys with the same effect; empty if there is no such key.
    note: the difference in meaning, or the alternative; starts in lower case and has no full stop.
    same: names in earlier trainers that mean exactly `keys` and are accepted as flags.
    The other fields: the names in each system, with underscores.
    """

    keys: tuple[str, ...] = ()
    note: str = ""
    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    mlx_lm: tuple[str, ...] = ()
    mlx_lm_lora: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    same: tuple[str, ...] = ()

    def names(self) -> dict[str, list[str]]:
        """The systems that use each name of the setting."""
        found: dict[str, list[str]] = {}
        for system, label in SYSTEMS.items():
            for name in getattr(self, system):
                found.setdefault(name, []).append(label)
        return found


def _row(
    keys: str = "",
    note: str = "",
    *,
    trl: str = "",
    verl: str = "",
    mlx_lm: str = "",
    mlx_lm_lora: str = "",
    earlier: str = "",
    same: str = "",
) -> Counterpart:
    """A row from names that are separated by blanks."""
    return Counterpart(
        keys=tuple(keys.split()),
        note=note,
        trl=tuple(trl.split()),
        verl=tuple(verl.split()),
        mlx_lm=tuple(mlx_lm.split()),
        mlx_lm_lora=tuple(mlx_lm_lora.split()),
        earlier=tuple(f"{earlier} {same}".split()),
        same=tuple(same.split()),
    )


REWARDS = (
    "rewards are functions with weights: --rewards format,my_rewards:score, or "
    """--rewards '[{name = "format", weight = 0.2}, {name = "math_eval", correct = true}]'"""
)
METRICS = "metrics are written to RUN_DIR/metrics.jsonl and served at /metrics"
LOCAL_DATA = "a dataset is a local file of JSON lines"
ONE_PROCESS = "one process on one machine trains, samples and serves"
FILES = "everything that a run writes is in RUN_DIR"
MICRO_BATCHES = "gradient accumulation follows from it and does not change the gradient"

# fmt: off
COUNTERPARTS = (
    # Run, model and data
    _row("run_dir", FILES, trl="output_dir logging_dir", verl="trainer.default_local_dir",
         earlier="output_dir save_path checkpoint_dir"),
    _row("steps", "the number of batches, each with at most one update", trl="max_steps",
         verl="trainer.total_training_steps actor_rollout_ref.actor.optim.total_training_steps", mlx_lm="iters",
         mlx_lm_lora="iters", same="num_iters total_steps training_steps num_training_steps"),
    _row("steps", "the length of a run is a number of batches; an epoch has as many as the dataset",
         trl="num_train_epochs", verl="trainer.total_epochs", mlx_lm_lora="epochs"),
    _row("seed", trl="data_seed", verl="data.seed"),
    _row(note="continue a run with --resume and its --run-dir", trl="resume_from_checkpoint",
         verl="trainer.resume_mode trainer.resume_from_path", mlx_lm="resume_adapter_file",
         mlx_lm_lora="resume_adapter_file", earlier="lora_path"),
    _row(note="a configuration file is named with --profile", mlx_lm="config", mlx_lm_lora="config", earlier="config"),
    _row("model.path", trl="model_name_or_path", verl="actor_rollout_ref.model.path", earlier="base_model",
         same="model_path model_name"),
    _row("model.dtype", trl="dtype torch_dtype bf16 fp16", verl="actor_rollout_ref.rollout.dtype"),
    _row("model.trust_remote_code", trl="trust_remote_code",
         verl="actor_rollout_ref.model.trust_remote_code data.trust_remote_code", mlx_lm="trust_remote_code"),
    _row(note="name a quantized model with --model and train an adapter on it; `mlx_lm.convert -q` makes one",
         trl="load_in_4bit load_in_8bit use_bnb_nested_quant", mlx_lm="quantize",
         mlx_lm_lora="load_in_4bits load_in_6bits load_in_8bits load_in_mxfp4 qat_enable", earlier="quantize_base"),
    _row("data.train", LOCAL_DATA, trl="dataset_name dataset_config dataset_train_split", verl="data.train_files",
         mlx_lm="data", mlx_lm_lora="data", earlier="dataset_name dataset_config",
         same="dataset_path train_dataset_path"),
    _row("data.heldout", trl="dataset_test_split eval_dataset", verl="data.val_files", same="val_dataset_path"),
    _row("data.prompt_key", verl="data.prompt_key"),
    _row("data.shuffle", trl="shuffle_dataset", verl="data.shuffle"),
    _row(note="prompts are never truncated; remove long prompts from the dataset", trl="max_prompt_length",
         verl="data.max_prompt_length actor_rollout_ref.rollout.prompt_length data.truncation"),
    _row("sampling.max_tokens", "it limits the completion, and prompts are never truncated", mlx_lm="max_seq_length",
         mlx_lm_lora="max_seq_length", earlier="seq_len max_token_length"),
    # Sampling
    _row("sampling.group_size", trl="num_generations", verl="actor_rollout_ref.rollout.n", mlx_lm_lora="group_size",
         same="group_size"),
    _row("sampling.max_tokens", trl="max_completion_length",
         verl="data.max_response_length actor_rollout_ref.rollout.response_length",
         mlx_lm_lora="max_completion_length", same="max_tokens"),
    _row("sampling.temperature", verl="actor_rollout_ref.rollout.temperature", trl="temperature",
         mlx_lm_lora="temperature", same="temperature"),
    _row("sampling.top_p", trl="top_p", verl="actor_rollout_ref.rollout.top_p"),
    _row("sampling.top_k", "0 disables it", trl="top_k", verl="actor_rollout_ref.rollout.top_k"),
    _row("sampling.min_p", trl="min_p"),
    _row("sampling.repetition_penalty", trl="repetition_penalty", verl="actor_rollout_ref.rollout.repetition_penalty"),
    _row("sampling.ignore_eos", verl="actor_rollout_ref.rollout.ignore_eos"),
    _row(note="the completions of a group have different seeds, so they always differ", earlier="diverse_mode"),
    _row("engine.max_num_seqs", verl="actor_rollout_ref.rollout.max_num_seqs"),
    _row("engine.prefill_chunk", verl="actor_rollout_ref.rollout.max_num_batched_tokens"),
    _row("engine.kv_cache_tokens", "the KV cache is bounded in tokens", trl="vllm_gpu_memory_utilization",
         verl="actor_rollout_ref.rollout.gpu_memory_utilization", earlier="gpu_memory_utilization"),
    _row("rollouts.max_batches_ahead", trl="steps_per_generation generation_batch_size", same="num_batches_ahead"),
    _row("async", "`--async false` is the strictly on-policy loop", earlier="disable_async"),
    _row("learner.max_staleness", verl="async_training.staleness_threshold"),
    _row(note="the decode engine is part of the run and shares its weights with the learner",
         trl="use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_timeout vllm_group_port"
         " vllm_enable_sleep_mode vllm_model_impl",
         verl="actor_rollout_ref.rollout.name actor_rollout_ref.rollout.mode"
         " actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.rollout.load_format",
         earlier="server_url vllm_restart_interval weight_bridge_mode"),
    _row(note=ONE_PROCESS, trl="deepspeed fsdp vllm_tensor_parallel_size ds3_gather_for_generation",
         verl="trainer.nnodes trainer.n_gpus_per_node actor_rollout_ref.rollout.tensor_model_parallel_size"
         " actor_rollout_ref.actor.strategy", earlier="world_size trainer_rank init_method num_inference_nodes"),
    # Rewards
    _row("rewards", REWARDS, trl="reward_funcs reward_weights",
         verl="custom_reward_function.path custom_reward_function.name reward_model.reward_manager",
         mlx_lm_lora="reward_functions reward_functions_file reward_weights",
         earlier="reward_content_type reward_format_weight reward_content_weight"),
    _row(note="a reward is a Python function, listed under [[rewards]]; reward models are not supported",
         trl="reward_model_name_or_path", verl="reward_model.enable reward_model.model.path", mlx_lm_lora="judge"),
    # Batches
    _row("learner.batch_size", "it counts prompts, and every prompt has sampling.group_size completions",
         trl="per_device_train_batch_size train_batch_size", verl="data.train_batch_size data.gen_batch_size",
         mlx_lm="batch_size", mlx_lm_lora="batch_size", earlier="batch_size rollout_batch_size"),
    _row("learner.num_minibatches", "it counts the optimizer steps of a pass over the batch",
         verl="actor_rollout_ref.actor.ppo_mini_batch_size"),
    _row("learner.micro_batch_tokens", MICRO_BATCHES, trl="gradient_accumulation_steps",
         verl="actor_rollout_ref.actor.ppo_micro_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
         " actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.use_dynamic_bsz",
         mlx_lm="grad_accumulation_steps", mlx_lm_lora="gradient_accumulation_steps",
         earlier="gradient_accumulation_steps"),
    _row("learner.batch_size",
         "a batch is a number of groups; --learner.micro-batch-tokens bounds the memory of an update",
         earlier="token_budget"),
    _row("learner.update_epochs", "it counts passes over each batch", trl="num_iterations",
         verl="actor_rollout_ref.actor.ppo_epochs", same="update_epochs"),
    _row("learner.layout", "sequences are packed or share prompts by default",
         verl="actor_rollout_ref.model.use_remove_padding"),
    # Objective
    _row("learner.objective", trl="loss_type importance_sampling_level",
         verl="algorithm.adv_estimator actor_rollout_ref.actor.policy_loss.loss_mode",
         mlx_lm_lora="train_mode grpo_loss_type importance_sampling_level", earlier="algorithm"),
    _row("learner.objective.clip_low learner.objective.clip_high", "the lower and the upper clip range", trl="epsilon",
         verl="actor_rollout_ref.actor.clip_ratio", mlx_lm_lora="epsilon", same="clip_ratio"),
    _row("learner.objective.clip_low", verl="actor_rollout_ref.actor.clip_ratio_low"),
    _row("learner.objective.clip_high", trl="epsilon_high", verl="actor_rollout_ref.actor.clip_ratio_high",
         mlx_lm_lora="epsilon_high"),
    _row("learner.objective.dual_clip", trl="delta", verl="actor_rollout_ref.actor.clip_ratio_c"),
    _row("learner.objective.sapo_tau_pos", trl="sapo_temperature_pos"),
    _row("learner.objective.sapo_tau_neg", trl="sapo_temperature_neg"),
    _row("learner.objective.loss_aggregation", verl="actor_rollout_ref.actor.loss_agg_mode"),
    _row("learner.objective.advantage", "`group` scales by the group's standard deviation, `mean` does not scale",
         trl="scale_rewards", verl="algorithm.norm_adv_by_std_in_grpo"),
    _row("learner.objective.mask_truncated", trl="mask_truncated_completions"),
    _row("learner.objective.dynamic_sampling_max_ratio", "0 turns it off",
         verl="algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches"),
    _row("learner.objective.overlong_penalty.buffer", verl="reward_model.overlong_buffer.len"),
    _row("learner.objective.overlong_penalty.max_penalty", verl="reward_model.overlong_buffer.penalty_factor"),
    _row("learner.objective.importance_correction",
         trl="vllm_importance_sampling_correction vllm_importance_sampling_mode",
         verl="algorithm.rollout_correction.rollout_is"),
    _row("learner.objective.importance_correction.high", trl="vllm_importance_sampling_cap",
         verl="algorithm.rollout_correction.rollout_is_threshold actor_rollout_ref.actor.tis_imp_ratio_cap"),
    _row("learner.objective.off_policy_mask", trl="off_policy_mask_threshold"),
    # KL penalty and entropy bonus
    _row("learner.kl_penalty.coef", trl="beta",
         verl="actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.use_kl_loss algorithm.kl_ctrl.kl_coef",
         mlx_lm_lora="beta", same="kl_beta"),
    _row("learner.kl_penalty.estimator", "`low_var_kl` is k3, `mse` is k2 and `kl` is k1",
         verl="actor_rollout_ref.actor.kl_loss_type algorithm.kl_penalty", earlier="kl_estimator"),
    _row("learner.kl_penalty", "`reward` subtracts the penalty from the reward, `loss` adds it to the loss",
         verl="algorithm.use_kl_in_reward"),
    _row("learner.kl_penalty.importance_weighted", trl="use_bias_correction_kl"),
    _row("learner.kl_penalty.control.target", verl="algorithm.kl_ctrl.target_kl"),
    _row("learner.kl_penalty.control.horizon", verl="algorithm.kl_ctrl.horizon"),
    _row("learner.kl_penalty.reference",
         "the reference is the base model, a snapshot or a moving average of the policy",
         trl="sync_ref_model", mlx_lm_lora="reference_model_path"),
    _row("learner.kl_penalty.reference.interval", trl="ref_model_sync_steps"),
    _row("learner.kl_penalty.reference.decay",
         "the share of itself that the reference keeps, which is 1 - ref_model_mixup_alpha",
         trl="ref_model_mixup_alpha", earlier="ref_ema"),
    _row("learner.entropy_bonus.coef", verl="actor_rollout_ref.actor.entropy_coeff", same="entropy_weight"),
    _row(note="every token that the policy sampled is trained on", trl="top_entropy_quantile", mlx_lm="mask_prompt",
         mlx_lm_lora="mask_prompt"),
    # Optimizer
    _row("learner.optimizer", trl="optim", mlx_lm="optimizer", mlx_lm_lora="optimizer"),
    _row("learner.optimizer.learning_rate", trl="learning_rate", verl="actor_rollout_ref.actor.optim.lr", mlx_lm=""
         " learning_rate", mlx_lm_lora="learning_rate", same="learning_rate lr"),
    _row("learner.schedule", trl="lr_scheduler_type",
         verl="actor_rollout_ref.actor.optim.warmup_style actor_rollout_ref.actor.optim.lr_scheduler_type",
         mlx_lm="lr_schedule", mlx_lm_lora="lr_schedule"),
    _row("learner.schedule.warmup_steps", "it counts steps", trl="warmup_steps warmup_ratio",
         verl="actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"),
    _row("learner.schedule.min_learning_rate", "it is a learning rate, not a ratio",
         verl="actor_rollout_ref.actor.optim.min_lr_ratio"),
    _row("learner.optimizer.weight_decay", trl="weight_decay", verl="actor_rollout_ref.actor.optim.weight_decay"),
    _row("learner.optimizer.beta1", trl="adam_beta1"),
    _row("learner.optimizer.beta2", trl="adam_beta2"),
    _row("learner.optimizer.epsilon", trl="adam_epsilon"),
    _row("learner.max_grad_norm", trl="max_grad_norm", verl="actor_rollout_ref.actor.grad_clip"),
    # Adapter
    _row("policy.method", trl="use_peft use_dora", mlx_lm="fine_tune_type", mlx_lm_lora="train_type"),
    _row("policy.method.rank", verl="actor_rollout_ref.model.lora_rank", same="lora_rank lora_r"),
    _row("policy.method.alpha", verl="actor_rollout_ref.model.lora_alpha", same="lora_alpha"),
    _row("policy.method.scale", same="lora_scale"),
    _row("policy.method.dropout", same="lora_dropout"),
    _row("policy.method.num_layers", mlx_lm="num_layers", mlx_lm_lora="num_layers", same="lora_layers"),
    _row("policy.method.target_modules", "a list of names such as q_proj or self_attn.q_proj",
         trl="lora_target_modules",
         verl="actor_rollout_ref.model.target_modules", earlier="lora_target_modules"),
    _row("policy.method.scaling", "`rank_stabilized` is rsLoRA", trl="use_rslora"),
    _row("policy.grad_checkpoint", trl="gradient_checkpointing",
         verl="actor_rollout_ref.model.enable_gradient_checkpointing", mlx_lm="grad_checkpoint",
         mlx_lm_lora="grad_checkpoint"),
    _row("checkpoint.adapter_path",
         "it names a directory for the trained adapter and never loads one; a run is continued with --resume",
         mlx_lm="adapter_path", mlx_lm_lora="adapter_path", earlier="adapter_path"),
    _row(note="adapters are always safetensors files that mlx-lm loads", earlier="adapter_format"),
    _row(note="fuse the trained adapter with `mlx_lm.fuse`", mlx_lm_lora="fuse lm_studio_name"),
    # Checkpoints, evaluation and logs
    _row("checkpoint.interval", trl="save_steps save_strategy", verl="trainer.save_freq", mlx_lm="save_every",
         mlx_lm_lora="save_every", earlier="save_every_step", same="checkpoint_interval"),
    _row("checkpoint.keep_last", trl="save_total_limit", verl="trainer.max_actor_ckpt_to_keep"),
    _row("eval.interval", trl="eval_steps eval_strategy do_eval", verl="trainer.test_freq", mlx_lm="steps_per_eval",
         mlx_lm_lora="steps_per_eval"),
    _row("eval.enabled", verl="trainer.val_before_train", mlx_lm="test", mlx_lm_lora="test"),
    _row("eval.problems", "it counts problems", trl="per_device_eval_batch_size num_generations_eval",
         verl="data.val_batch_size", mlx_lm="val_batches test_batches", mlx_lm_lora="val_batches test_batches"),
    _row("monitor.rollouts", "rollouts are written to RUN_DIR/rollouts.jsonl",
         trl="log_completions num_completions_to_print", verl="trainer.rollout_data_dir trainer.log_val_generations"),
    _row(note=METRICS, trl="report_to logging_steps logging_strategy run_name",
         verl="trainer.logger trainer.project_name trainer.experiment_name",
         mlx_lm="report_to project_name steps_per_report", mlx_lm_lora="wandb steps_per_report",
         earlier="use_wandb wandb wandb_project wandb_group"),
    _row(note="nothing is uploaded", trl="push_to_hub hub_model_id hub_token"),
    _row(note="every run trains; --dry-run only checks", mlx_lm="train", mlx_lm_lora="train", trl="do_train"),
    # Server and environments
    _row("server.host", same="host"),
    _row("server.port", trl="vllm_server_port", earlier="vllm_port", same="port"),
    _row("server.max_concurrent", earlier="max_concurrent_requests"),
    _row("atropos.url", earlier="atropos_url api_url"),
)
# fmt: on


@cache
def by_name() -> dict[str, Counterpart]:
    """The row of every name, with underscores."""
    return {name: row for row in COUNTERPARTS for name in row.names()}


@cache
def accepted() -> dict[str, tuple[str, ...]]:
    """The keys that an accepted name sets, by name."""
    return {name: row.keys for row in COUNTERPARTS for name in row.same}


def advice(name: str) -> str | None:
    """The end of an error message that names the alternative; None if no other trainer uses the name."""
    name = name.replace("-", "_")
    row = by_name().get(name)
    if row is None:
        return None
    used_by = f"{name} in {', '.join(row.names()[name])}"
    if not row.keys:
        return f"there is no such setting ({used_by}); {row.note}"
    flags = " and ".join("--" + key.removesuffix(".type").replace("_", "-") for key in row.keys)
    return f"use {flags} ({used_by})" + (f"; {row.note}" if row.note else "")
