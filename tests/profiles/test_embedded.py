"""The embedded policy and its problems, which Clotho ships so that a first run needs no network."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from transformers import AutoTokenizer

from profiles.embedded_maker.__main__ import problems as make_problems
from profiles.embedded_maker.demonstrations import careful, careless
from profiles.embedded_maker.problems import GENERATORS, KINDS, LEVELS, column_steps
from profiles.maker.evaluate import is_right
from profiles.maker.problem import Problem, draw_distinct, write_problems
from profiles.maker.tokenizer import CHAT_TEMPLATE, TAG_TOKENS, chat_prompt, train_tokenizer

EMBEDDED = Path(__file__).parents[2] / "profiles" / "embedded"
MAX_BYTES = 4_000_000


def lines(name: str) -> list[dict[str, str]]:
    """Read the rows of a shipped JSONL file."""
    return [json.loads(line) for line in (EMBEDDED / name).read_text(encoding="utf-8").splitlines()]


@cache
def made_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """The problems of a seed, for training and held out."""
    return make_problems(seed)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Load the shipped tokenizer with transformers, offline."""
    loader: Any = AutoTokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return loader.from_pretrained(EMBEDDED)


def solve(expression: str) -> int:
    """Compute an expression of +, - and *, with the usual precedence."""
    assert re.fullmatch(r"\d+( [-+*] \d+)*", expression), expression
    total = 0
    for sign, term in re.findall(r"([-+]?) ?(\d+(?: \* \d+)*)", expression):
        value = 1
        for factor in term.split(" * "):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total


def solve_comparison(prompt: str) -> str:
    """Find the letter of the largest or smallest option."""
    options: dict[str, str] = dict(re.findall(r"([A-D])\) (.*?)(?= [A-D]\)|$)", prompt))
    values = {solve(text): letter for letter, text in options.items()}
    return values[max(values) if "largest" in prompt else min(values)]


def solve_sequence(prompt: str) -> int:
    """Compute the next term, by a constant second difference."""
    a, b, c, d = map(int, re.findall(r"\d+", prompt))
    assert d - c - (c - b) == c - b - (b - a)
    return d + (d - c) + (d - c) - (c - b)


def solve_word_problem(prompt: str) -> int:
    """Compute the final count of a word problem."""
    boxes = re.search(r"has (\d+) boxes of (\d+)", prompt)
    first = re.search(r"has (\d+)", prompt)
    assert first
    count = int(boxes[1]) * int(boxes[2]) if boxes else int(first[1])
    for verb, number in re.findall(r"(buys|finds|sells|loses) (\d+)", prompt):
        count += int(number) if verb in ("buys", "finds") else -int(number)
    return count


def solve_prompt(row: dict[str, str]) -> str:
    """Return the correct answer of a problem from its prompt."""
    prompt = row["prompt"]
    match row["type"]:
        case "comparison":
            return solve_comparison(prompt)
        case "sequence":
            return str(solve_sequence(prompt))
        case "word":
            return str(solve_word_problem(prompt))
        case _:
            return str(solve(prompt.removeprefix("What is ").removesuffix("?")))


def test_the_embedded_files_have_at_most_four_megabytes() -> None:
    """Weights, tokenizer, problems and model card together."""
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= MAX_BYTES


def test_mlx_lm_loads_the_policy_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlx_lm.load` needs only the directory; logits are finite float32, and the end token is set."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded: Any = mlx_lm.load(str(EMBEDDED))
    model, tokenizer = loaded[:2]
    messages = [{"role": "user", "content": "What is 15 + 27?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    logits = model(mx.array([prompt]))
    assert logits.dtype == mx.float32
    assert mx.isfinite(logits).all().item()
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_the_configuration_agrees_with_the_tokenizer(tokenizer: Any) -> None:
    """config.json and generation_config.json have the token ids of the tokenizer."""
    config = json.loads((EMBEDDED / "config.json").read_text())
    generation = json.loads((EMBEDDED / "generation_config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation["eos_token_id"] == [tokenizer.eos_token_id]
    assert config["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_decoding_inverts_encoding_of_random_text(tokenizer: Any) -> None:
    """Random code points of every plane, without surrogates."""
    rng = Random(0)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    for _ in range(200):
        text = "".join(map(chr, rng.sample(points, 20)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tags_and_digits_are_single_tokens_and_not_special(tokenizer: Any) -> None:
    """`skip_special_tokens` removes the tokens of the chat template, but not the tags."""
    assert len(tokenizer.encode("3141592653")) == 10
    for tag in TAG_TOKENS:
        assert len(tokenizer.encode(tag)) == 1
    ids = tokenizer.encode("<think>1+1=2</think><answer>2</answer><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>1+1=2</think><answer>2</answer>"


def test_the_chat_template_renders_every_role(tokenizer: Any) -> None:
    """The format of Qwen, with the start of the assistant message if a generation prompt is requested."""
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == chat_prompt("u")
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_the_datasets_have_enough_problems_of_every_type() -> None:
    """At least 2,000 training problems and 500 held-out problems, evenly distributed over the types."""
    for name, least in (("train.jsonl", 2000), ("heldout.jsonl", 500)):
        rows = lines(name)
        counts = Counter(row["type"] for row in rows)
        assert len(rows) >= least
        assert set(counts) == set(KINDS)
        assert min(counts.values()) > 0.9 * len(rows) / len(KINDS)
        assert all(set(row) == {"prompt", "answer", "type"} for row in rows)
        assert all(isinstance(value, str) for row in rows for value in row.values())


def test_prompts_are_unique() -> None:
    """Over training and held-out problems."""
    prompts = [row["prompt"] for name in ("train.jsonl", "heldout.jsonl") for row in lines(name)]
    assert len(set(prompts)) == len(prompts)


def test_every_answer_is_correct() -> None:
    """A solver that reads only the prompt computes every answer."""
    for row in lines("train.jsonl") + lines("heldout.jsonl"):
        assert solve_prompt(row) == row["answer"], row["prompt"]


def test_the_problems_are_reproducible(tmp_path: Path) -> None:
    """The same seed gives the shipped files, byte for byte; another seed gives other problems."""
    for name, problems in zip(("train.jsonl", "heldout.jsonl"), made_problems(0), strict=True):
        write_problems(tmp_path / name, problems)
        assert (tmp_path / name).read_bytes() == (EMBEDDED / name).read_bytes()
    assert made_problems(1)[1] != made_problems(0)[1]


def test_the_tokenizer_is_reproducible() -> None:
    """The merges are a function of the training problems."""
    made = train_tokenizer(problem.prompt for problem in made_problems(0)[0])
    shipped = json.loads((EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(made.to_str())["model"] == shipped["model"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_careful_demonstrations_are_correct_and_careless_ones_are_not(kind: str, level: int) -> None:
    """Every step of a careful demonstration is correct; careless answers have no reward."""
    rng = Random(7)
    for _ in range(100):
        problem = KINDS[kind](rng, level)
        assert is_right(careful(problem), problem.answer)
        assert not is_right(careless(problem, rng), problem.answer)
        for left, _, right in (step.partition("=") for step in problem.work):
            assert solve(re.sub(r"([-+*])", r" \1 ", left)) == int(right) if right else left[0] in "ABCD"
        if kind == "comparison":
            assert problem.work[-1][0] == problem.answer


def test_column_steps_carry_and_borrow() -> None:
    """The two examples of the docstring."""
    assert column_steps(347, "+", 285) == ["7+5=12", "4+8+1=13", "3+2+1=6"]
    assert column_steps(55, "-", 15) == ["5-5=0", "5-1=4"]
    assert column_steps(532, "-", 285) == ["12-5=7", "13-1-8=4", "5-1-2=2"]


def test_generated_problems_are_distinct_and_evenly_distributed() -> None:
    """The counts of types and levels differ by at most one; excluded prompts do not occur."""
    first = draw_distinct(Random(0), GENERATORS, 100)
    second = draw_distinct(Random(0), GENERATORS, 100, exclude=[problem.prompt for problem in first])
    assert not {problem.prompt for problem in first} & {problem.prompt for problem in second}
    counts = Counter((problem.kind, problem.level) for problem in first)
    assert max(counts.values()) - min(counts.values()) <= 1
