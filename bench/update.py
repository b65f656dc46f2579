"""What one policy update costs, in time and in memory, beside mlx-lm-lora's GRPO and TRL's.

    python -m bench update [--repeats 5] [--out bench/results/update.jsonl]

All learn from the same rollouts: random tokens, 2,048 of them in completions, every second completion rewarded. The
first case has 4 prompts of 128 tokens with 8 completions of 64 tokens each; then vocabulary and model vary, and the
length of the completions, of which there are fewer where they are longer. The models are Qwen3 shapes with random
weights in float32 and tied embeddings: 6m has 6 layers of width 256, 25m has 8 of width 512. All train an adapter of
rank 8 on every linear layer of the blocks at a learning rate of 1e-5, with no KL penalty, by GRPO's loss. An update is
the gradient and one optimizer step, with everything evaluated at its end; rollouts and rewards are there before it.

What they do is not quite the same. Ours clips the ratio to the policy that the rollouts came from and reports the
entropy and how far that policy is. mlx-lm-lora and TRL take that policy to be the one that learns, with a ratio of 1,
as they do whenever rollouts are used once; TRL reports the entropy, mlx-lm-lora does not. mlx-lm-lora runs as many
completions at once as its trainer would for four prompts. All of them at once, its other choice, took 3.5 to 7 times
the memory; at a vocabulary of 4,096 that made no difference to the time, and at larger ones it took longer. The
`checkpointed` contender recomputes activations, its own way to save memory (`grad_checkpoint`).

peak_bytes is the most that was held at once beyond what was held before: of arrays (`mx.get_peak_memory`) where MLX
computes, of the resident set where PyTorch does.
Contenders are processes of their own that run by turns, with one thread for matrix products each; PyTorch also has
two. It is measured at a vocabulary of 4,096 alone, for time's sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.answering import Question, answer
from bench.charts import draw_lines
from bench.contenders.process import Contender, Metric, by_turns
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "update"
COMMAND = "python -m bench update"
RESULTS = results_path(NAME)
Case = dict[str, str | int | float]

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
    """By default as many prompts and tokens as in the first case."""
    return {
        "model": model,
        "vocabulary": vocabulary,
        "prompts": prompts,
        "group": group,
        "prompt_tokens": 128,
        "completion_tokens": completion_tokens,
    }


FIRST = case("6m", 32_768)
LARGER: tuple[Case, ...] = (
    case("6m", 151_936),
    case("25m", 8192),
    FIRST | {"model": "25m"},
    FIRST | {"prompts": 1, "completion_tokens": 256},
    FIRST | {"prompts": 1, "group": 4, "completion_tokens": 512},
)


def measure(repeats: int) -> list[Measurement]:
    """All cases; repeats are fewer beside the first, and where an update takes long."""
    three, two = min(3, repeats), min(2, repeats)
    return [
        *_by_turns([OURS, MLX_LM_LORA, TRL, TWO_THREADS], [case("6m", 4096)], three),
        *_by_turns([OURS, MLX_LM_LORA, CHECKPOINTED], [FIRST], repeats),
        *_by_turns([OURS, MLX_LM_LORA], LARGER, two),
    ]


def measure_quickly() -> list[Measurement]:
    """The policy that is shipped, once, beside MLX alone."""
    return _by_turns([OURS, MLX_LM_LORA], [case("embedded", 384, prompts=1, completion_tokens=16)], 1)


def _by_turns(contenders: Sequence[Contender], cases: Sequence[Case], repeats: int) -> list[Measurement]:
    return by_turns(NAME, contenders, cases, METRICS, repeats=repeats, command=COMMAND)


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """All results; none where there is no file."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """Speed and memory, a row per case."""
    return report(results, ["tokens_per_second", "peak_bytes"])


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Memory against the vocabulary, in the cases that differ in nothing else from the first."""
    chosen = [one for one in results if {**one.case, "vocabulary": FIRST["vocabulary"]} == FIRST]
    title = "memory of an update of 6m, 32 completions of 64 tokens"
    draw_lines(chosen, "peak_bytes", "vocabulary", target, title=title, logarithmic=True)


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=5,
    quick="the smallest case, once",
    results=RESULTS,
    measure=lambda repeats, quick: measure_quickly() if quick else measure(repeats),
    table=table,
)
main = partial(answer, QUESTION)
