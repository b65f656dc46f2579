"""On Linux, norms, gates, attention and LoRA are those of attachments/cpu; nothing here was measured on Metal.

Measures time and peak memory of one policy update, beside the GRPO trainers of mlx-lm-lora and TRL.

    python -m bench update [--repeats 5] [--only long] [--out bench/results/update.jsonl]

All contenders train on the same rollouts: random tokens, 2,048 completion tokens per update, every second completion
rewarded. The first case has 4 prompts of 128 tokens with 8 completions of 64 tokens each. The other cases vary the
vocabulary, the model, and the completion length; longer completions are fewer. The models are Qwen3 shapes with random
float32 weights and tied embeddings: 6m has 6 layers of width 256, 25m has 8 layers of width 512. All contenders train
an adapter of rank 8 on every linear layer of the blocks, at learning rate 1e-5, with the GRPO loss and without a KL
penalty. An update is the gradient and one optimizer step, fully evaluated. Rollouts and rewards exist before the clock
starts.

The contenders do not do exactly the same work. Clotho clips the importance ratio to the rollout policy, and reports the
entropy and the mismatch KL. mlx-lm-lora and TRL use a ratio of 1, as they do when rollouts are used once. TRL reports
the entropy; mlx-lm-lora does not. mlx-lm-lora processes as many completions at once as its trainer does for four
prompts. Processing all completions at once, its other setting, took 3.5 to 7 times the memory; at a vocabulary of 4,096
it took the same time, at larger vocabularies longer. The `checkpointed` contender recomputes activations
(`grad_checkpoint`), the memory-saving setting of mlx-lm-lora.

`--only long` measures Clotho alone, with the embedded policy, on two completions of 1,024 to 16,384 tokens: memory, and
the longest turn, whose limit is `learner.max_turn_ms`.

peak_bytes is the peak memory during the update minus the memory before it: MLX arrays (`mx.get_peak_memory`) for MLX,
the resident set for PyTorch. Each contender is a separate process with one thread for matrix products, and contenders
alternate. TRL is also measured with two threads, and only at a vocabulary of 4,096 because it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.benchmark import Benchmark
from bench.charts import draw_lines
from bench.contenders.process import Contender, measure_interleaved
from bench.measurement import Case, Measurement, Metric
from bench.tables import report

NAME = "update"
OURS = Contender(name="clotho", module="bench.contenders.clotho_update")
MLX_LM_LORA = Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_update", foreign=True)
CHECKPOINTED = Contender(
    name="mlx-lm-lora, checkpointed",
    module="bench.contenders.mlx_lm_lora_update",
    foreign=True,
    environment={"MLX_LM_LORA_CHECKPOINTED": "1"},
)
TRL = Contender(name="trl", module="bench.contenders.trl_update", foreign=True)
TWO_THREADS = Contender(
    name="trl, 2 threads", module="bench.contenders.trl_update", foreign=True, environment={"TRL_THREADS": "2"}
)
METRICS = (
    Metric(name="tokens_per_second", unit="tokens/s", better="higher"),
    Metric(name="peak_bytes", unit="bytes", better="lower"),
    Metric(name="seconds", unit="s", better="lower"),
)


def case(model: str, vocabulary: int, *, prompts: int = 4, group: int = 8, completion_tokens: int = 64) -> Case:
    """One case; by default with the prompts and tokens of the first case."""
    return {
        "model": model,
        "vocabulary": vocabulary,
        "prompts": prompts,
        "group": group,
        "prompt_tokens": 128,
        "completion_tokens": completion_tokens,
    }


FIRST = case("6m", 32_768)
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
LONGEST_TURN = Metric(name="longest_turn_seconds", unit="seconds", better="lower")
LARGER: tuple[Case, ...] = (
    case("6m", 151_936),
    case("25m", 8192),
    FIRST | {"model": "25m"},
    FIRST | {"prompts": 1, "completion_tokens": 256},
    FIRST | {"prompts": 1, "group": 4, "completion_tokens": 512},
)


def measure(repeats: int) -> list[Measurement]:
    """Measure all cases; fewer repeats for all cases but the first."""
    three, two = min(3, repeats), min(2, repeats)
    return [
        *_interleaved([OURS, MLX_LM_LORA, TRL, TWO_THREADS], [case("6m", 4096)], three),
        *_interleaved([OURS, MLX_LM_LORA, CHECKPOINTED], [FIRST], repeats),
        *_interleaved([OURS, MLX_LM_LORA], LARGER, two),
    ]


def measure_quickly() -> list[Measurement]:
    """Measure the embedded policy once, beside mlx-lm-lora."""
    return _interleaved([OURS, MLX_LM_LORA], [case("embedded", 384, prompts=1, completion_tokens=16)], 1)


def measure_long(repeats: int, quick: bool) -> list[Measurement]:
    """Measure long completions; quick: the shortest of them once."""
    lengths, repeats = (LENGTHS[:1], 1) if quick else (LENGTHS, repeats)
    cases = [case("embedded", 384, prompts=1, group=2, completion_tokens=tokens) for tokens in lengths]
    return measure_interleaved(NAME, [OURS], cases, [*METRICS, LONGEST_TURN], repeats=repeats)


def _interleaved(contenders: Sequence[Contender], cases: Sequence[Case], repeats: int) -> list[Measurement]:
    return measure_interleaved(NAME, contenders, cases, METRICS, repeats=repeats)


def table(results: Sequence[Measurement]) -> str:
    """Speed and memory, one row per case; the longest turn, where it was measured."""
    turns = [LONGEST_TURN.name] if any(one.metric == LONGEST_TURN.name for one in results) else []
    return report(results, ["tokens_per_second", "peak_bytes", *turns])


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Draw memory against vocabulary, for the cases that equal the first case otherwise."""
    chosen = [one for one in results if {**one.case, "vocabulary": FIRST["vocabulary"]} == FIRST]
    title = "memory of an update of 6m, 32 completions of 64 tokens"
    draw_lines(chosen, "peak_bytes", "vocabulary", target, title=title, logarithmic=True)


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=5,
    quick="measure the smallest case once",
    measure=lambda repeats, quick: measure_quickly() if quick else measure(repeats),
    table=table,
    parts={"long": measure_long},
)
read, main = BENCHMARK.read, BENCHMARK.main
