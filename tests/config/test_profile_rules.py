"""LossSettings between settings: each refusal says why and what to do; what is allowed stays allowed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clotho.config.rules import validate
from clotho.config.schema import Profile
from protocols.errors import ProfileError

BASE: dict[str, Any] = {
    "model": {"path": "base"},
    "data": {"train": "train.jsonl"},
    "rewards": [{"name": "exact", "correct": True}],
}

TAP = {"name": "mine", "factory": "a:B", "mode": "tap", "at": "scored"}
REPLACE_EVALUATOR = TAP | {"mode": "replace", "at": "evaluator"}


def profile(**sections: Any) -> Profile:
    """A profile from its tables."""
    return msgspec.convert({**BASE, **sections, "data": {**BASE["data"], **sections.get("data", {})}}, Profile)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"policy": {"scale": 1.0, "alpha": 8.0}}, "policy.scale and policy.alpha say the same"),
        ({"policy": {"num_layers": 0}}, "policy.num_layers = 0 trains nothing"),
        ({"policy": {"dropout": 0.1, "grad_checkpoint": True}}, "policy.dropout = 0.1 and policy.grad_checkpoint"),
        ({"policy": {"kind": "full", "rank": 4}}, "policy.rank has no effect: it belongs to adapters"),
        ({"policy": {"kind": "full", "target_modules": ["a"]}}, "policy.target_modules has no effect"),
        ({"policy": {"kind": "full", "ranks": ["q=2"]}}, "policy.ranks has no effect: it belongs to adapters"),
        ({"policy": {"kind": "full", "train_head": True}}, "policy.train_head has no effect"),
        ({"policy": {"scaling": "rank_stabilized"}}, "policy.scaling has no effect: it says what policy.alpha means"),
        ({"replay": {"groups": 2}}, "replay.groups has no effect: replay.capacity = 0 means that nothing is kept"),
        ({"replay": {"capacity": 4, "groups": 5}}, "replay.groups is too large: it must be at most replay.capacity"),
        ({"replay": {"capacity": 9, "priority": "recency"}}, "replay.priority has no effect"),
        ({"replay": {"capacity": 9, "sampling": "priority", "exponent": 2.0}}, "replay.exponent has no effect"),
        ({"collapse_detection": {"on_collapse": "off", "window": 9}}, "collapse_detection.window has no effect"),
        ({"collapse_detection": {"on_collapse": "stop", "rollback_rate": 0.5}}, "collapse_detection.rollback_rate has no effect"),
        ({"collapse_detection": {"kl_high": 1.0}}, "collapse_detection.kl_high has no effect: learner.kl_beta = 0"),
        ({"collapse_detection": {"empty_format_high": 0.2}}, 'empty_format_high has no effect: there is no reward named "format"'),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature = 0"),
        ({"sampling": {"repetition_penalty": 1.1}}, "sampling.repetition_penalty = 1.1"),
        ({"sampling": {"top_logprobs": 2}}, "sampling.top_logprobs must be 0"),
        ({"sampling": {"max_tokens": 64}, "engine": {"kv_cache_tokens": 64}}, "max_tokens = 64 must be less"),
        ({"async": False, "rollouts": {"max_batches_ahead": 3}}, "rollouts.max_batches_ahead has no effect"),
        ({"parity": {"warn_nats": 0.6}}, "parity.warn_nats = 0.6 must be at most parity.stop_nats = 0.5"),
        ({"parity": {"tokens": 0, "warn_nats": 0.1}}, "parity.warn_nats has no effect"),
        ({"checkpoint": {"interval": 0, "keep_last": 5}}, "checkpoint.keep_last has no effect"),
        ({"eval": {"enabled": False, "interval": 5}}, "eval.interval has no effect"),
        ({"steps": 20, "eval": {"interval": 20}}, "eval.interval is too large: it must be less than steps"),
        ({"eval": {"problems_between": 5}}, "eval.problems_between has no effect: eval.interval = 0"),
        ({"data": {"heldout": "h", "heldout_fraction": 0.2}}, "data.heldout_fraction has no effect"),
        ({"data": {"heldout_fraction": 0.0}}, "data.heldout_fraction = 0 leaves nothing to measure on"),
        ({"data": {"prompt_key": "answer"}}, "data.prompt_key and data.answer_key are both 'answer'"),
        ({"data": {"type_key": ""}}, "data.type_key must name a column"),
        ({"server": {"host": "0.0.0.0"}}, "server.host = '0.0.0.0' is reachable from other machines"),
        ({"server": {"host": "::"}}, "server.host = '::' is reachable"),
        ({"server": {"host": ""}}, "server.host = '' is reachable"),
        ({"server": {"enabled": False, "port": 9}}, "server.port has no effect"),
        ({"rewards": [{"name": "exact"}]}, "rewards: evaluation counts one with correct = true"),
        ({"rewards": [{"name": "exact", "weight": 0.0, "correct": True}]}, "rewards: every weight is 0"),
        ({"rewards": [{"name": "exact", "correct": True}] * 2}, "rewards: exact is listed 2 times"),
        ({"run_dir": ""}, "run_dir must name a directory"),
        ({"run_dir": "runs/{sed}"}, "run_dir: unknown placeholder {sed}; there is {profile}"),
        ({"actors": [TAP, TAP]}, "actors: 2 are named 'mine'"),
        ({"actors": [TAP | {"at": "score"}]}, "actors: 'mine' (tap) must be at one of prompts, rollouts, scored, "
         "reports, not 'score'; did you mean scored?"),
        ({"actors": [TAP | {"mode": "replace"}]}, "actors: 'mine' (replace) must be at one of prompter, generator"),
        ({"actors": [TAP | {"mode": "insert", "at": ""}]}, "actors: 'mine' (insert) must be at one of"),
        ({"actors": [TAP | {"mode": "add"}]}, "actors: 'mine' is added beside the others and needs no `at`"),
        ({"actors": [TAP | {"name": "learner"}]}, "actors: 'learner' is the name of a box"),
        ({"actors": [TAP | {"name": n, "mode": "replace", "at": "scorer"} for n in "ab"]}, "actors: 2 replace scorer"),
        ({"eval": {"enabled": False}, "actors": [REPLACE_EVALUATOR]}, "replaces the evaluator"),
        (
            {"learner": {"dynamic_sampling": True}, "actors": [REPLACE_EVALUATOR | {"at": "learner"}]},
            "learner.dynamic_sampling = true is the default learner's",
        ),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(sections: dict[str, Any], message: str) -> None:
    """No option without effect, no distribution that the learner does not evaluate, no open door."""
    with pytest.raises(ProfileError) as caught:
        validate(profile(**sections))
    assert str(caught.value).startswith("profile: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"sampling": {"temperature": 0.7, "ignore_eos": True, "stop": ["\n\n"]}},
        {"policy": {"kind": "full", "grad_checkpoint": True}},
        {"policy": {"kind": "dora", "alpha": 8.0, "scaling": "rank_stabilized", "ranks": ["mlp.up_proj=4"]}},
        {"eval": {"interval": 19}, "steps": 20},
        {"server": {"host": "0.0.0.0", "api_key": "k"}},
        {"server": {"host": "::1"}},
        {"server": {"host": "localhost"}},
        {"eval": {"enabled": False}, "rewards": [{"name": "exact"}], "data": {"heldout_fraction": 0.0}},
        {"actors": [TAP, TAP | {"name": "scorer", "mode": "replace", "at": "scorer"}]},
        {"actors": [TAP | {"mode": "add", "at": ""}]},
        {"async": False},
    ],
    ids=str,
)
def test_what_makes_sense_is_allowed(sections: dict[str, Any]) -> None:
    """The rules refuse no honest combination."""
    validate(profile(**sections))
