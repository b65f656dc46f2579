"""The environments in the interpreter that they are for, with the real managed server of atroposlib."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.atropos.atroposlib_python import python_with_atropos
from tests.environments.scripts import EMBEDDED, ENVIRONMENTS

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 40}


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    """One group of every environment."""
    command = [python_with_atropos(), str(Path(__file__).with_name("play.py")), str(ENVIRONMENTS), str(EMBEDDED)]
    environment = {**os.environ, **OFFLINE, "CLOTHO_SAMPLING": json.dumps(SAMPLING)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    groups: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return groups


def rendered(*messages: tuple[str, str], answer: bool) -> str:
    """The chat as the policy's own template writes it, up to where an answer is asked for if `answer`."""
    loader: Any = AutoTokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        tokenizer = loader.from_pretrained(EMBEDDED)
    chat = [{"role": role, "content": content} for role, content in messages]
    text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer)
    return text


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """Where a sequence is trained, from and to."""
    edges = [i for i in range(1, len(mask)) if (mask[i] == -100) != (mask[i - 1] == -100)]
    edges += [len(mask)] if mask[-1] != -100 else []
    return list(zip(edges[::2], edges[1::2], strict=True))


def check_alignment(group: dict[str, Any]) -> None:
    """Labels are the tokens or -100, log-probabilities 1.0 where there is no label."""
    for tokens, labels, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        for token, label, logprob in zip(tokens, labels, logprobs, strict=True):
            assert (label, logprob) in ((token, -0.5), (-100, 1.0))


def test_a_problem_is_asked_once_for_the_whole_group_as_the_run_samples(played: dict[str, Any]) -> None:
    """With the settings that the run stated, in the chat's form without a system message."""
    group = played["arithmetic"]
    (asked,) = group["asked"]
    assert {key: asked[key] for key in SAMPLING} == SAMPLING
    assert asked["n"] == 2
    prompt = rendered(("user", "What is 2 + 3?"), answer=True)
    assert all(text.startswith(prompt + "<think>") for text in group["texts"])
    assert group["scores"] == [1.2, 0.0]
    check_alignment(group)


def test_every_turn_of_a_game_is_trained_and_no_hint_is(played: dict[str, Any]) -> None:
    """The sequence is the chat as the template writes it, with one end token after every turn."""
    group = played["game"]["second"]
    wrong, right = "<think></think><answer>3</answer>", "<think>1</think><answer>5</answer>"
    question, hint = "Ann has many coins. How many coins now?", "Ann has more. How many coins now?"
    chat = rendered(("user", question), ("assistant", wrong), ("user", hint), ("assistant", right), answer=False)
    assert group["texts"] == [chat.rstrip("\n")]
    assert len(spans(group["masks"][0])) == 2
    assert [group["tokens"][0][end - 1] for _, end in spans(group["masks"][0])] == [2, 2]
    assert group["scores"] == [0.8]
    check_alignment(group)


def test_a_game_ends_with_an_unreadable_guess(played: dict[str, Any]) -> None:
    """It has earned nothing, and the turns before it are trained on with that."""
    assert played["game"]["scores"] == [0.0]
    assert len(spans(played["game"]["masks"][0])) == 2


def test_a_turn_is_at_most_as_long_as_the_run_and_the_game_allow(played: dict[str, Any]) -> None:
    """The smaller of the two."""
    assert [asked["max_tokens"] for asked in played["game"]["asked"]] == [24, 24]


@pytest.mark.parametrize("name", ["lost", "lost game"])
def test_a_failed_request_loses_the_group_alone(played: dict[str, Any], name: str) -> None:
    """It is an error of the group's own, which atroposlib logs."""
    assert "error" in played[name]


def test_a_worked_solution_is_judged_by_what_follows_its_mark(played: dict[str, Any]) -> None:
    """Form and answer earn what they are set to; an answer without tags counts only where it is allowed to."""
    assert played["question"]["scores"] == [1.5, 0.0]
    assert played["untagged"]["scores"] == [1.0, 0.0]
    assert all("<|im_start|>system\n" in text for text in played["question"]["texts"])


@pytest.mark.parametrize("name", ["arithmetic", "guessing_game", "question_answer"])
def test_the_command_line_says_what_can_be_set(name: str) -> None:
    """Beside what every environment of Atropos has."""
    command = [python_with_atropos(), str(ENVIRONMENTS / f"{name}.py"), "serve", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **OFFLINE}, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    own = "--env.turns" if name == "guessing_game" else "--env.data_path"
    assert own in done.stdout
    assert "--env.rollout_server_url" in done.stdout
