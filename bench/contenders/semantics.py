"""What the number of each contender means, in one sentence per program.

A program reports its sentence with its results. The generated tables print the sentence of this table, so that it can
be reworded without a new measurement.
"""

from __future__ import annotations

SEMANTICS = {
    "clotho_decode": (
        "Decode engine with the profile's default settings: one request per prompt, one seed per completion; each "
        "prompt is prefilled once. The clock runs from the first request to the last completion. A completion has "
        "tokens and their log-probabilities under the sampling distribution; no text is produced."
    ),
    "mlx_lm_decode": (
        "BatchGenerator with completion_batch_size and prefill_batch_size equal to the number of sequences, its "
        "fastest setting. Each sequence prefills its own copy of the prompt, because BatchGenerator has no groups. "
        "The clock runs from the creation of the generator to the last token. Completions are tokens; no text is "
        "produced. The log-probability of each token is read from the returned row of the vocabulary."
    ),
    "mlx_lm_lora_decode": (
        "generate_grpo with batch_size equal to the number of sequences, its fastest setting. The prompt of a group "
        "is prefilled once. No log-probabilities are returned and no text is produced."
    ),
    "mlx_lm_lora_decode, as its trainer calls it": (
        "generate_grpo with batch_size equal to the number of prompts, as its trainer calls it: this many sequences "
        "decode together. The prompt of a group is prefilled once. No log-probabilities are returned and no text is "
        "produced."
    ),
    "clotho_first_token": (
        "From the submission of a streamed request to an idle decode engine until its first token is reported with "
        "its log-probability. The request asks for more tokens and is aborted then."
    ),
    "mlx_lm_first_token": (
        "From the call of stream_generate until it yields the first token, without reading its log-probability. "
        "More tokens are requested, and the generator is closed then."
    ),
    "clotho_update": (
        "An update with the profile's default settings, from scored groups to evaluated weights and their "
        "fingerprint: advantages, micro-batches, the clipped importance ratio against the rollout policy, the exact "
        "entropy and the other metrics of an update, gradient clipping, AdamW."
    ),
    "mlx_lm_lora_update": (
        "An update of its GRPO trainer, from rewards to evaluated weights: 4 completions at a time, an importance "
        "ratio of exactly 1 (a rollout is used once, before the policy changes), no gradient clipping, no entropy, "
        "Adam."
    ),
    "trl_update": (
        "A step of its GRPOTrainer, from scored rollouts to new weights: 8 completions at a time, an importance "
        "ratio of 1, entropy and other metrics, gradient clipping, AdamW. Memory is the growth of the resident set "
        "during the step; memory that the allocator kept from earlier steps does not count."
    ),
    "clotho_sft": (
        "An update on demonstrations with the profile's default settings, from groups to evaluated weights and their "
        "fingerprint, with gradient clipping, AdamW and the metrics of an update. Prompts are context."
    ),
    "mlx_lm_sft": (
        "The second iteration of `train`, with its own batches: rows are padded to a multiple of 32. Prompts are "
        "masked (`--mask-prompt`), Adam, no gradient clipping. The first iteration compiles the step."
    ),
    "clotho_metal": (
        "Clotho on the device path, without the kernels of the CPU backend. decode: steady decode steps of all rows, "
        "without prefill; completions of a group share a prompt. build_seconds: CPU time of the calling thread until "
        "the graph of a step is given to MLX; host_seconds: until the step is over, waiting excluded. nodes, kernels: "
        "operations of a decode step, and those that start a kernel on Metal. update: an update after one equal "
        "update, with checkpointed blocks; a turn is the time for which it keeps its thread. peak_bytes: with "
        "weights. swap_seconds: with the rest of the decode step that runs at the time. mean_kl, largest_nats, "
        "served_kl: the parity check of a run, between sampler and learner and between decode steps with the same "
        "weights. first_token_seconds: from the request of one completion to its first token, on an idle engine. "
        "float32_error: relative error of a product of float32 matrices, 1e-7 in float32 and 1e-4 in TF32. "
        "samples_equal: fraction of the completions that are equal, bit for bit, when they are sampled again "
        "with equal seeds. updates_equal: 1 if the weights after the update are equal, bit for bit, when it is "
        "computed again."
    ),
    "mlx_lm_metal": (
        "BatchGenerator with the same weights, and the same adapter as LoRA layers of mlx-lm. decode: steady decode "
        "steps of all rows, without prefill; log-probabilities are computed and not read. first_token_seconds: from "
        "the insertion of a prompt to its first token. BatchGenerator wires the recommended memory while it lives."
    ),
    "mlx_lm_lora_metal": (
        "The update of its trainer after an equal one, with the same base weights, a new adapter on every linear layer "
        "of the blocks, and checkpointed blocks."
    ),
    "clotho_swap": (
        "Everything that the broadcaster runs in the decode thread for one update: the served parameters become "
        "the new arrays, which the learner has already computed, the prefix cache is emptied, and the running "
        "sequences continue. Median and longest swap of a repeat."
    ),
    "clotho_turns": (
        "Processor time of the run and of the processes of the environment, which includes the environment itself, per "
        "message of the policy or per rollout; prefilled tokens of an episode of four turns per token of its last "
        "prompt."
    ),
    "clotho_save": (
        "Longest and median decode step while a thread saves checkpoints, minus the median decode step without other "
        "work; the longest step without other work, minus this median; and the duration of a checkpoint, from the "
        "first byte to the removal of the one before."
    ),
    "clotho_serve": (
        "`pipeline.py serve` with default settings. If there is an adapter, every request names it. Every response is "
        "sampled with its own seed, and log-probabilities are computed for every token."
    ),
    "mlx_lm_serve": (
        "`python -m mlx_lm server --decode-concurrency 64 --prompt-concurrency 64`, so that all clients fit into "
        "one batch. Its listen backlog is increased, because it resets connections of 16 simultaneous clients "
        "otherwise. Requests name no model."
    ),
    "clotho_adapters": (
        "Decode engine with default settings and loaded adapters; every row of the batch names its adapter. Sampled "
        "tokens per second while all rows are decoded, with their log-probabilities; no text is produced."
    ),
    "clotho_overlap": (
        "Engine and learner compute in a thread each. Sampled tokens per second of wall "
        "time, without other work, and during updates that follow each other without a pause."
    ),
    "clotho_train": (
        "Seconds from the first prompt to the update in question, of `python pipeline.py`. Versions are kept "
        "and evaluated after the run, so evaluation is not counted. `from_command`: from the start of the process."
    ),
    "mlx_lm_lora_train": (
        "Seconds of training, without loading and evaluation, until the update in question. One process samples and "
        "trains alternately. `from_command`: from the start of the process, imports and loading included."
    ),
    "trl_train": (
        "Seconds of training, without loading and evaluation, until the update in question. PyTorch on the CPU, one "
        "process samples (transformers, without vLLM) and trains alternately. `from_command`: from the start of the "
        "process, imports and loading included."
    ),
}
"""Sentence by program (module name in bench/contenders), or by kind of run."""

PROGRAMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("decode", "clotho"): ("clotho_decode",),
    ("decode", "mlx-lm"): ("mlx_lm_decode",),
    ("decode", "mlx-lm-lora"): ("mlx_lm_lora_decode",),
    ("decode", "mlx-lm-lora, as its trainer calls it"): ("mlx_lm_lora_decode, as its trainer calls it",),
    ("first_token", "clotho"): ("clotho_first_token",),
    ("first_token", "mlx-lm"): ("mlx_lm_first_token",),
    ("update", "clotho"): ("clotho_update",),
    ("update", "mlx-lm-lora"): ("mlx_lm_lora_update",),
    ("update", "trl"): ("trl_update",),
    ("sft", "clotho"): ("clotho_sft",),
    ("sft", "mlx-lm"): ("mlx_lm_sft",),
    ("metal", "clotho"): ("clotho_metal",),
    ("metal", "mlx-lm"): ("mlx_lm_metal",),
    ("metal", "mlx-lm-lora"): ("mlx_lm_lora_metal",),
    ("serve", "clotho"): ("clotho_serve",),
    ("serve", "mlx_lm.server"): ("mlx_lm_serve",),
    ("swap", "clotho"): ("clotho_swap",),
    ("save", "clotho"): ("clotho_save",),
    ("turns", "clotho"): ("clotho_turns",),
    ("overlap", "clotho"): ("clotho_overlap",),
    ("peers", "clotho"): ("clotho_train",),
    ("peers", "mlx-lm-lora"): ("mlx_lm_lora_train",),
    ("peers", "trl"): ("trl_train",),
}
"""The programs behind each contender of a benchmark; a variant such as "trl, 2 threads" has those of "trl"."""


def meaning(benchmark: str, contender: str) -> str | None:
    """What the numbers of a contender mean in a benchmark; None for contenders that the table does not list."""
    programs = PROGRAMS.get((benchmark, contender)) or PROGRAMS.get((benchmark, contender.partition(",")[0]))
    return None if programs is None else " ".join(SEMANTICS[program] for program in programs)
