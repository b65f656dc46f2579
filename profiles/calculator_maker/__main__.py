"""Make the policy of `calculator` and its problems again: `python -m profiles.calculator_maker --out DIR --seed 0`.

Writes the problems, the tokenizer, the configuration and the trained weights.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from profiles.calculator_maker.problems import GENERATORS, episode
from profiles.maker.command import run_command
from profiles.maker.problem import Problem, make_problems, write_problems
from profiles.maker.tokenizer import save_tokenizer, train_tokenizer

HELD_OUT, TRAINING = 256, 2048
"""Problems in heldout.jsonl and in train.jsonl; no prompt occurs twice in the two together."""

TEMPLATE = (
    "{#- tools are called as in [name(a=1, b=2)] #}{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{%- for call in message.tool_calls or [] %}{{- '[' if loop.first else ', ' }}{{- call.function.name + '(' }}"
    "{%- for name, value in call.function.arguments.items() %}"
    "{{- name + '=' + (value | string) + (')' if loop.last else ', ') }}{%- endfor %}"
    "{{- ']' if loop.last }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""That of the embedded policy, with calls as the policy writes them. It knows the tools: they are not in its prompt."""


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw the training problems and the held-out problems of a seed."""
    return make_problems(GENERATORS, seed, training=TRAINING, held_out=HELD_OUT)


def tokenizer_of(training: list[Problem], seed: int) -> Tokenizer:
    """Train the tokenizer on one episode of each problem."""
    rng = Random(seed)
    return train_tokenizer(f"{problem.prompt}\n{episode(problem, rng)}" for problem in training)


def make(out: Path, seed: int) -> None:
    """Write the whole directory `out`."""
    from profiles.maker import pretrain  # imports MLX, after load_blas

    shape = pretrain.SHAPE | {"num_hidden_layers": 2}
    training, held_out = problems(seed)
    out.mkdir(parents=True, exist_ok=True)
    write_problems(out / "train.jsonl", training)
    write_problems(out / "heldout.jsonl", held_out)
    tokenizer = tokenizer_of(training, seed)
    save_tokenizer(tokenizer, out, context=shape["max_position_embeddings"], template=TEMPLATE)
    model = pretrain.make_model(shape, tokenizer.get_vocab_size(), seed)
    lesson = pretrain.Lesson(
        draw=lambda rng: rng.choice(GENERATORS)(rng),
        demonstrate=lambda problem, rng, step: episode(problem, rng),
        exclude={problem.prompt for problem in held_out},
    )
    pretrain.pretrain(model, tokenizer, lesson, pretrain.Schedule(steps=500, batch_size=32), seed=seed)
    pretrain.save_model(model, tokenizer, shape, out)


if __name__ == "__main__":
    run_command("python -m profiles.calculator_maker", __doc__, make)
