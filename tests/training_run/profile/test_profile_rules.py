"""Rules between settings of different sections."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training_run.profile.profile_faults import TAP, decoded, fault
from training_run.profile.keys import SETTABLE
from training_run.profile.rules import contradictions, rules_without_effect

RESTARTED: dict[str, Any] = {
    "type": "remote", "server_url": ["http://127.0.0.1:1"], "weights": {"type": "restart"},
}  # fmt: skip
REPLACE_EVALUATOR = TAP | {"mode": "replace", "at": "evaluator"}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"policy": {"method": {"scale": 1.0, "alpha": 8.0}}}, "policy.method.alpha"),
        ({"policy": {"method": {"num_layers": 0}}}, "policy.method.num_layers"),
        ({"generator": RESTARTED, "sampling": {"temperature": 0.7}}, "sampling.temperature"),
        ({"generator": RESTARTED, "sampling": {"top_k": 9}}, "sampling.top_k"),
        ({"generator": RESTARTED, "sampling": {"stop": ["x"]}}, "sampling.stop"),
        ({"generator": RESTARTED | {"api_key": "k"}}, "generator.api_key"),
        ({"server": {"weights_root": "shared"}}, "server.weights_root"),
        ({"policy": {"method": {"dropout": 0.1}, "grad_checkpoint": True}}, "policy.method.dropout"),
        ({"policy": {"method": {"scale": 1.0, "scaling": "rank_stabilized"}}}, "policy.method.scaling"),
        ({"replay": {"type": "buffer", "capacity": 4, "groups": 5}}, "replay.groups"),
        ({"steps": 20, "learner": {"kl_penalty": {"reference": {"type": "snapshot", "interval": 20}}}},
         "learner.kl_penalty.reference.interval"),
        ({"collapse_detection": {"type": "off", "window": 9}}, "collapse_detection.window"),
        ({"collapse_detection": {"type": "stop", "rollback_rate": 0.5}}, "collapse_detection.rollback_rate"),
        ({"collapse_detection": {"kl_high": 1.0}}, "collapse_detection.kl_high"),
        ({"collapse_detection": {"empty_format_high": 0.2}}, "collapse_detection.empty_format_high"),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature"),
        ({"sampling": {"repetition_penalty": 1.1}}, "sampling.repetition_penalty"),
        ({"sampling": {"top_logprobs": 2}}, "sampling.top_logprobs"),
        ({"sampling": {"max_tokens": 64}, "engine": {"kv_cache_tokens": 64}}, "sampling.max_tokens"),
        ({"async": False, "rollouts": {"max_batches_ahead": 3}}, "rollouts.max_batches_ahead"),
        ({"rollouts": {"lag": 3}}, "rollouts.lag"),
        (
            {"async": False, "rollouts": {"lag": 3}, "learner": {"objective": "dapo"}},
            "learner.objective.dynamic_sampling_max_ratio",
        ),
        ({"parity": {"type": "off", "warn_nats": 0.1}}, "parity.warn_nats"),
        ({"checkpoint": {"interval": 0, "keep_last": 5}}, "checkpoint.keep_last"),
        ({"eval": {"type": "off", "interval": 5}}, "eval.interval"),
        ({"eval": {"problems_between": 5}}, "eval.problems_between"),
        ({"data": {"heldout": "h", "heldout_fraction": 0.2}}, "data.heldout_fraction"),
        ({"data": {"heldout_fraction": 0.0}}, "data.heldout_fraction"),
        ({"data": {"curriculum": "success_rate"}, "atropos": {"type": "mock"}}, "data.curriculum"),
        (
            {
                "data": {"curriculum": "success_rate"},
                "actors": [TAP | {"name": "own", "mode": "replace", "at": "prompter"}],
            },
            "data.curriculum",
        ),
        ({"data": {"curriculum": {"type": "uniform", "sharpness": 9.0}}}, "data.curriculum.sharpness"),
        ({"data": {"prompt_key": "answer"}}, "data.answer_key"),
        ({"data": {"reasoning_gym": [{"dataset": "gcd"}]}}, "data.reasoning_gym"),
        (
            {"data": {"train": "reasoning_gym:lcm", "reasoning_gym": [{"dataset": "gcd"}]}},
            "data.reasoning_gym",
        ),
        (
            {"data": {"train": "reasoning_gym:gcd", "reasoning_gym": [{"dataset": "gcd", "name": "x"}]}},
            "data.reasoning_gym",
        ),
        ({"data": {"train": "reasoning_gym:gcd", "reasoning_gym": [{"dataset": "gcd"}] * 2}}, "data.reasoning_gym"),
        ({"data": {"type_key": "x", "prompt_key": "answer"}}, "data.answer_key"),
        ({"server": {"host": "0.0.0.0"}}, "server.host"),
        ({"server": {"host": "::"}}, "server.host"),
        ({"server": {"host": ""}}, "server.host"),
        ({"server": {"type": "off", "port": 9}}, "server.port"),
        ({"rewards": [{"name": "exact"}]}, "rewards"),
        ({"cluster": {"type": "ray", "address": "ray://127.0.0.1:10001"}}, "cluster.address"),
        ({"cluster": "ray", "generator": {"type": "remote", "server_url": ["http://host:1"]}}, "generator"),
        ({"atropos": "mock", "generator": {"type": "remote", "server_url": ["http://host:1"]}}, "generator"),
        ({"atropos": "mock", "cluster": "ray"}, "cluster"),
        ({"rewards": [{"name": "mine:one", "where": "cluster", "correct": True}]}, "rewards"),
        ({"rewards": [{"name": "exact", "weight": 0.0, "correct": True}]}, "rewards"),
        ({"run_dir": ""}, "run_dir"),
        ({"run_dir": "runs/{sed}"}, "run_dir"),
        ({"actors": [TAP, TAP]}, "actors"),
        ({"actors": [TAP | {"at": "score"}]}, "actors"),
        ({"actors": [TAP | {"mode": "replace"}]}, "actors"),
        ({"actors": [TAP | {"mode": "insert", "at": ""}]}, "actors"),
        ({"actors": [TAP | {"mode": "add"}]}, "actors"),
        ({"actors": [TAP | {"name": "learner"}]}, "actors"),
        ({"actors": [TAP | {"name": n, "mode": "replace", "at": "scorer"} for n in "ab"]}, "actors"),
        ({"eval": "off", "actors": [REPLACE_EVALUATOR]}, "actors"),
        (
            {"learner": {"objective": "dapo"}, "actors": [REPLACE_EVALUATOR | {"at": "learner"}]},
            "learner.objective.dynamic_sampling_max_ratio",
        ),
    ],
)  # fmt: skip
def test_a_contradiction_or_a_setting_without_effect_is_refused(sections: dict[str, Any], key: str) -> None:
    """The complaint names the key."""
    assert fault(**sections) == key


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({}, "sampling.group_size"),
        ({"learner": {"objective": {"type": "rloo"}}}, "sampling.group_size"),
        ({"learner": {"objective": {"type": "dpo"}}, "preference": {"pairs": "rewards"}}, "sampling.group_size"),
        ({"learner": {"objective": {"advantage": "batch"}}}, None),
        ({"critic": "value_head"}, None),
        ({"learner": {"distillation_weight": 1.0}, "distillation": {"teacher": "large"}}, None),
    ],
)
def test_a_group_of_one_needs_something_else_to_be_compared_with(sections: dict[str, Any], key: str | None) -> None:
    """A critic, a teacher, or the other groups of the batch."""
    assert fault(sampling={"group_size": 1}, **sections) == key


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"sampling": {"temperature": 0.7, "ignore_eos": True, "stop": ["\n\n"]}},
        {"policy": {"method": "full", "grad_checkpoint": True}},
        {
            "policy": {
                "method": {"type": "dora", "alpha": 8.0, "scaling": "rank_stabilized", "ranks": ["mlp.up_proj=4"]}
            }
        },
        {"eval": {"interval": 20}, "checkpoint": {"interval": 50}, "steps": 20},
        {"data": {"curriculum": {"type": "success_rate", "explore": 0.3, "sharpness": 5.0}}},
        {"server": {"host": "0.0.0.0", "api_key": "k"}},
        {"server": {"host": "::1"}},
        {"server": {"host": "localhost"}},
        {"eval": "off", "rewards": [{"name": "exact"}], "data": {"heldout_fraction": 0.0}},
        {"actors": [TAP, TAP | {"name": "scorer", "mode": "replace", "at": "scorer"}]},
        {"actors": [TAP | {"mode": "add", "at": ""}]},
        {"async": False},
        {"cluster": "ray", "rewards": [{"name": "mine:one", "where": "cluster", "correct": True}]},
        {"rewards": [{"name": "exact", "types": ["a"], "correct": True}, {"name": "exact", "types": ["b"]}]},
    ],
    ids=str,
)
def test_valid_combinations_are_allowed(sections: dict[str, Any]) -> None:
    """The rules refuse no valid combination."""
    assert fault(**sections) is None


@pytest.mark.parametrize(
    ("sections", "ahead", "staleness"),
    [
        ({}, 2, 4),
        ({"rollouts": {"max_batches_ahead": 1}}, 1, 4),
        ({"rollouts": {"max_batches_ahead": 32}}, 32, 64),
        ({"rollouts": {"max_batches_ahead": 32}, "learner": {"max_staleness": 3}}, 32, 3),
        ({"async": False}, 0, 4),
        ({"async": False, "rollouts": {"lag": 64}}, 64, 128),
    ],
)
def test_the_limit_on_staleness_follows_from_the_batches_ahead(
    sections: dict[str, Any], ahead: int, staleness: int
) -> None:
    """Groups of a run that is far ahead are not discarded, unless the profile says so."""
    profile = decoded(**sections)
    assert (profile.max_batches_ahead, profile.max_staleness) == (ahead, staleness)


def test_every_rule_is_about_keys_that_exist() -> None:
    """A key that is absent belongs to an attachment that is: a misspelt one would never be refused."""
    keys = {key for rule in (*rules_without_effect(), *contradictions()) for key in rule.keys.split()}
    assert keys - SETTABLE.keys() == set()
