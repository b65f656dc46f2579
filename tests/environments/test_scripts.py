"""The environments in an interpreter with atroposlib and its managed server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from attachments.atropos.tests.atroposlib_python import python_with_atropos
from tests.environments.paths import EMBEDDED, ENVIRONMENTS

pytestmark = pytest.mark.needs_extra("atroposlib")

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 40}


@pytest.fixture(scope="module")
def groups() -> dict[str, Any]:
    """Return one group of every environment."""
    command = [
        python_with_atropos(),
        str(Path(__file__).with_name("collect_groups.py")),
        str(ENVIRONMENTS),
        str(EMBEDDED),
    ]
    environment = {**os.environ, **OFFLINE, "CLOTHO_SAMPLING": json.dumps(SAMPLING)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    groups: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return groups


def rendered(*messages: tuple[str, str], answer: bool) -> str:
    """Return the rendered chat, with the generation prompt if `answer`."""
    loader: Any = AutoTokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        tokenizer = loader.from_pretrained(EMBEDDED)
    chat = [{"role": role, "content": content} for role, content in messages]
    text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer)
    return text


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """Return the trained spans of a sequence."""
    edges = [i for i in range(1, len(mask)) if (mask[i] == -100) != (mask[i - 1] == -100)]
    edges += [len(mask)] if mask[-1] != -100 else []
    return list(zip(edges[::2], edges[1::2], strict=True))


def check_alignment(group: dict[str, Any]) -> None:
    """Check that a token has its own label and log-probability, or -100 and 1.0."""
    for tokens, labels, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        for token, label, logprob in zip(tokens, labels, logprobs, strict=True):
            assert (label, logprob) in ((token, -0.5), (-100, 1.0))


def test_one_request_samples_the_whole_group_with_the_parameters_of_the_run(groups: dict[str, Any]) -> None:
    """The prompt is the rendered chat without a system message."""
    group = groups["arithmetic"]
    (request,) = group["requests"]
    assert {key: request[key] for key in SAMPLING} == SAMPLING
    assert request["n"] == 2
    prompt = rendered(("user", "What is 2 + 3?"), answer=True)
    assert all(text.startswith(prompt + "<think>") for text in group["texts"])
    assert group["scores"] == [1.2, 0.0]
    check_alignment(group)


def test_all_turns_of_a_game_are_trained_on_and_hints_are_masked(groups: dict[str, Any]) -> None:
    """The sequence equals the rendered chat, with one end token after every turn."""
    group = groups["game"]["second"]
    wrong, right = "<think></think><answer>3</answer>", "<think>1</think><answer>5</answer>"
    question, hint = "Ann has many coins. How many coins now?", "Ann has more. How many coins now?"
    chat = rendered(("user", question), ("assistant", wrong), ("user", hint), ("assistant", right), answer=False)
    assert group["texts"] == [chat.rstrip("\n")]
    assert len(spans(group["masks"][0])) == 2
    assert [group["tokens"][0][end - 1] for _, end in spans(group["masks"][0])] == [2, 2]
    assert group["scores"] == [0.8]
    check_alignment(group)


def test_a_completion_without_a_guess_ends_the_game(groups: dict[str, Any]) -> None:
    """The score is 0, and the earlier turns are trained on."""
    assert groups["game"]["scores"] == [0.0]
    assert len(spans(groups["game"]["masks"][0])) == 2


def test_the_length_of_a_turn_is_limited_by_the_run_and_by_the_game(groups: dict[str, Any]) -> None:
    """The smaller limit applies."""
    assert [request["max_tokens"] for request in groups["game"]["requests"]] == [24, 24]


@pytest.mark.parametrize("name", ["lost", "lost game"])
def test_a_failed_request_loses_only_its_group(groups: dict[str, Any], name: str) -> None:
    """atroposlib logs the exception."""
    assert "error" in groups[name]


def test_the_format_and_the_answer_have_separate_scores(groups: dict[str, Any]) -> None:
    """An answer without tags counts only if `tags_needed` is false."""
    assert groups["question"]["scores"] == [1.5, 0.0]
    assert groups["untagged"]["scores"] == [1.0, 0.0]
    assert all("<|im_start|>system\n" in text for text in groups["question"]["texts"])


SETTINGS = {"arithmetic": "--env.data_path", "guessing_game": "--env.turns", "question_answer": "--env.data_path"}
"""Environments, each with one of its own settings."""

HELP = """
import os, runpy, sys
sys.path[0] = os.path.dirname(sys.argv[1])
for path in sys.argv[1:]:
    sys.argv = [path, "serve", "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print(f"<end of {path}: {end.code}>", flush=True)
"""
"""Prints the help of several scripts; importing atroposlib takes seconds."""


def test_the_help_lists_the_settings_of_the_environment() -> None:
    """In addition to the settings of `BaseEnvConfig`."""
    paths = [str(ENVIRONMENTS / f"{name}.py") for name in SETTINGS]
    done = subprocess.run(
        [python_with_atropos(), "-c", HELP, *paths],
        capture_output=True, text=True, env={**os.environ, **OFFLINE}, timeout=300, check=False,
    )  # fmt: skip
    text = done.stdout
    for path, own in zip(paths, SETTINGS.values(), strict=True):
        shown, end, text = text.partition(f"<end of {path}: 0>")
        assert end, done.stderr[-2000:]
        assert own in shown, path
        assert "--env.rollout_server_url" in shown, path
