"""The command line: every key is a flag, and names of other trainers are accepted or refused with the right key."""

from __future__ import annotations

from typing import Any

import pytest

from attachments.migration.other_trainers import by_name
from clotho.settings.keys import REQUIRED, Key
from clotho.settings.learner import LossKLPenalty
from clotho.settings.objectives import Grpo, PpoDecoupled, TruncateCorrection
from protocols.errors import ProfileError
from training_run.profile.aliases import KEYS
from training_run.profile.flags import Arguments, parse_arguments
from training_run.profile.keys import CHOICES, PROFILE_KEYS, SETTABLE, flag_of
from training_run.profile.load import flatten, load_profile

TABLES = (
    "[{name = 'a', factory = 'a.b:C', mode = 'tap', at = 'scored'}]",
    "[{name = 'a', script = 'a.py'}]",
    "[{dataset = 'a'}]",
)


EXAMPLES = (
    "false", "3", "0.5", "1.5", "some text", "{a = 1}", "[[1, 2.0]]", "[{name = 'a'}]", "[{name = 'wandb'}]",
    "[{kind = 'rl', steps = 1}]", "mlp.up_proj=4", "a:b",
)  # fmt: skip


def example(key: Key) -> str:
    """Return a text that the key's flag takes."""
    words = key.allowed.removesuffix(" or none")
    first = words.removeprefix("one of ").split(", ")[-1] if words.startswith("one of ") else ""
    return next(text for text in (first, *EXAMPLES, "http://a:1", *TABLES) if text and accepts(key, text))


def accepts(key: Key, text: str) -> bool:
    """Whether a text of a flag becomes a value of the key."""
    try:
        PROFILE_KEYS.converted(key, parse_arguments([flag_of(key.path), text]).overrides[key.path], "", text=True)
    except ProfileError:
        return False
    return True


def nested(path: str, value: object) -> dict[str, Any]:
    """Return the tables of a file with one key."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize(("earlier", "path"), KEYS.items())
def test_a_key_keeps_its_earlier_name(earlier: str, path: str) -> None:
    """As a flag, in a profile and in the settings of an earlier run. The own name is the one that is written."""
    assert parse_arguments([flag_of(earlier), "64"]).overrides == {path: 64}
    assert flatten(nested(earlier, 64), "profile.toml") == {path: 64}
    assert earlier not in SETTABLE


UNIONS = [choice for choice, types in CHOICES.items() if "off" in types]


@pytest.mark.parametrize("choice", UNIONS)
def test_a_union_is_turned_off_by_off_and_by_none(choice: str) -> None:
    """`none` was the word of some, and the settings of earlier runs have it; `off` is the type of every union."""
    union = choice.removesuffix(".type")
    flag = f"--{union.replace('_', '-')}"
    assert "none" not in CHOICES[choice]
    assert parse_arguments([flag, "none"]) == parse_arguments([flag, "off"])
    for value in ("none", {"type": "none"}):
        assert flatten(nested(union, value), "profile.toml") == {choice: "off"}


@pytest.mark.parametrize("word", ["off", "none"])
@pytest.mark.parametrize(
    ("key", "value"), [("monitor.display", "none"), ("rollouts.scoring", None), ("learner.max_grad_norm", 0)]
)
def test_off_and_none_turn_a_number_and_a_choice_off(word: str, key: str, value: object) -> None:
    """As a flag and in a file; 0 is read as before."""
    assert parse_arguments([flag_of(key), word]).overrides == {key: value}
    assert flatten(nested(key, word), "profile.toml") == {key: value}


@pytest.mark.parametrize("key", ["eval.problems", "sampling.temperature", "learner.batch_size", "server.port"])
def test_a_number_whose_zero_is_not_off_refuses_the_words(key: str) -> None:
    """`eval.problems = 0` means all problems."""
    with pytest.raises(ProfileError, match="must be"):
        parse_arguments([flag_of(key), "off"])


def test_every_key_is_a_flag() -> None:
    """With dashes or underscores, with a space or `=`; read as the key's own type."""
    for path, key in SETTABLE.items():
        text = example(key)
        dashed = parse_arguments([f"--{path.replace('_', '-')}", text]).overrides
        assert dashed.keys() == {path}
        assert parse_arguments([f"--{path}={text}"]).overrides == dashed
        default = key.variants[0].default
        if default not in (REQUIRED, None, "all", "auto"):  # all, auto: instead of a number or a boolean
            assert type(PROFILE_KEYS.converted(key, dashed[path], "", text=True)) is type(default), path


def test_a_command_line_of_an_earlier_trainer_gives_a_valid_profile() -> None:
    """The flags that mean the same are accepted together."""
    line = (
        "--model-path ./m --dataset-path d.json --group-size 4 --num-iters 1000 --learning-rate 1e-5 --lora-rank 16 "
        "--lora-scale 10.0 --num-batches-ahead 3 --clip-ratio 0.2 --kl-beta 0.05 --max-tokens 256 "
        "--checkpoint-interval 50"
    )
    profile = load_profile("local-m3", parse_arguments(line.split()).overrides)
    assert (profile.sampling.group_size, profile.steps) == (4, 1000)
    assert profile.learner.objective == Grpo(loss_aggregation="token_mean", clip_low=0.2, clip_high=0.2)
    assert profile.learner.kl_penalty == LossKLPenalty(coef=0.05)
    assert profile.data.heldout == ""


def test_a_setting_in_the_style_of_verl_is_refused_with_the_right_key() -> None:
    """verl's settings have no dashes in front."""
    with pytest.raises(ProfileError, match=r"unexpected argument 'data.max_response_length': use --sampling.max-t"):
        parse_arguments(["data.max_response_length=9"])


def test_no_name_of_the_table_hides_a_flag() -> None:
    """A flag of the program is looked up in the table only with a value that it does not take."""
    assert {name for name in by_name() if name in SETTABLE and any(not row.keys for row in by_name()[name])} == set()


def test_one_word_chooses_the_type_of_a_union() -> None:
    """A longer flag sets a key of the type."""
    line = "--learner.objective ppo_decoupled --learner.objective.clip-low 0.1 --learner.num-minibatches 2 "
    line += "--learner.objective.importance-correction truncate"
    overrides = parse_arguments(line.split()).overrides
    assert overrides == {
        "learner.objective.type": "ppo_decoupled",
        "learner.objective.clip_low": 0.1,
        "learner.num_minibatches": 2,
        "learner.objective.importance_correction.type": "truncate",
    }
    objective = load_profile("local-m3", overrides).learner.objective
    assert objective == PpoDecoupled(clip_low=0.1, importance_correction=TruncateCorrection())
    assert parse_arguments(["--learner.objective.type", "gspo"]) == parse_arguments(["--learner.objective", "gspo"])


def test_a_key_that_the_type_does_not_have_is_refused_with_the_types_that_have_it() -> None:
    """SAPO has no clip range."""
    overrides = parse_arguments(["--learner.objective", "sapo", "--learner.objective.clip-low", "0.1"]).overrides
    with pytest.raises(ProfileError) as caught:
        load_profile("local-m3", overrides)
    for part in ("learner.objective.clip_low", "'sapo'", "grpo, dr_grpo"):
        assert part in str(caught.value)


def test_the_top_flags_are_read() -> None:
    """What a run does, beside what a profile says."""
    line = "--profile qwen3-m3 --steps 3 --seed 7 --run-dir r --resume --model a/b --dataset f.jsonl --async false"
    assert parse_arguments([*line.split(), "--dry-run"]) == Arguments(
        profile="qwen3-m3",
        resume=True,
        dry_run=True,
        overrides={
            "steps": 3, "seed": 7, "run_dir": "r", "model.path": "a/b", "data.train": "f.jsonl", "async": False,
        },
    )  # fmt: skip
    assert parse_arguments(["--clean"]).clean
    assert parse_arguments([]) == Arguments(profile="local-m3")


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--dry-run"], True), (["--dry-run", "full"], "full"), (["--dry-run", "false"], False), ([], False)],
)
def test_a_dry_run_is_a_switch_that_also_takes_full(words: list[str], expected: bool | str) -> None:
    """Without a value it prints the settings that differ from the defaults."""
    assert parse_arguments(words).dry_run == expected


def test_another_value_of_a_dry_run_is_refused() -> None:
    """With the allowed values."""
    with pytest.raises(ProfileError, match="full"):
        parse_arguments(["--dry-run", "none"])


def test_lists_are_repeated_or_written_as_toml_or_json() -> None:
    """Arrays of tables in the one form that is short enough for a shell."""
    expected = {"sampling.stop": ("a,b", "c")}
    assert parse_arguments(["--sampling.stop", "a,b", "--sampling.stop", "c"]).overrides == expected
    assert parse_arguments(["--sampling.stop", '["a,b", "c"]']).overrides == expected
    assert parse_arguments(["--sampling.stop=['a,b']", "--sampling.stop=c"]).overrides == expected
    assert parse_arguments(["--sampling.stop-token-ids", "[1, 2]"]).overrides == {"sampling.stop_token_ids": (1, 2)}
    toml = parse_arguments(["--rewards", '[{name="format", weight=0.2}]']).overrides
    assert toml == parse_arguments(["--rewards", '[{"name": "format", "weight": 0.2}]']).overrides
    assert toml == parse_arguments(["--rewards", '{name="format", weight=0.2}']).overrides
    assert toml == {"rewards": [{"name": "format", "weight": 0.2}]}


def test_rewards_may_be_listed_by_name() -> None:
    """Every named reward has weight 1; all but `format` define which answers are correct."""
    overrides = parse_arguments(["--rewards", "format,my_rewards:score"]).overrides
    assert overrides == {
        "rewards": [{"name": "format", "correct": False}, {"name": "my_rewards:score", "correct": True}]
    }
    assert [reward.name for reward in load_profile("local-m3", overrides).rewards] == ["format", "my_rewards:score"]


def test_booleans_may_stand_alone_and_optional_keys_may_be_taken_back() -> None:
    """--monitor.rollouts is true; --policy.method.scale none is as if it had never been given."""
    assert parse_arguments(["--monitor.rollouts", "--steps", "2"]).overrides == {"monitor.rollouts": True, "steps": 2}
    assert parse_arguments(["--eval", "off"]).overrides == {"eval.type": "off"}
    assert parse_arguments(["--policy.method.scale", "none"]).overrides == {"policy.method.scale": None}


def test_the_same_value_may_be_given_twice() -> None:
    """Scripts append flags."""
    assert parse_arguments(["--lr", "1e-5", "--learner.optimizer.learning-rate", "0.00001"]).overrides == {
        "learner.optimizer.learning_rate": 1e-5
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--learner.learnin-rate 1", "unknown flag --learner.learnin-rate; did you mean "
         "--learner.optimizer.learning-rate?"),
        ("--group_sze=1", "unknown flag --group_sze; did you mean --group-size?"),
        ("--sampling.stop a b", "unexpected argument 'b': repeat --sampling.stop for every value of the list"),
        ("train.jsonl", "unexpected argument 'train.jsonl': every setting is a flag, see --help"),
        ("--steps", "--steps needs a value"),
        ("--learner.optimizer muno", "--learner.optimizer must be one of adamw, adafactor, lion, muon, sgd, "
         'not "muno"; did you mean muon?'),
        ("--steps ten", '--steps must be an integer >= 1, not "ten"'),
        ("--lr -1", '--learner.optimizer.learning-rate must be a number > 0 or none, not "-1"'),
        ("--lr inf", '--learner.optimizer.learning-rate must be finite, not "inf"'),
        ("--async maybe", '--async must be true or false, not "maybe"'),
        ("--resume --clean", "--resume continues a run and --clean deletes it: choose one"),
        ("--fork a --resume", "--resume continues a run and --fork starts a new one: choose one"),
        ("--fork a --policy.adapter b", "--fork and --policy.adapter both give the initial weights: choose one"),
        ("--steps 3 --num-iters 4", "--steps is given twice: 3 and 4"),
        ("--clip-ratio 0.2 --learner.objective.clip-high 0.3",
         "--learner.objective.clip-high is given twice: 0.2 and 0.3"),
        ("--profile a --profile b", '--profile is given twice: "a" and "b"'),
        ("--sampling.stop-token-ids [1,", '--sampling.stop-token-ids must be a list, each an integer >= 0, written as '
         'TOML or JSON, not "[1,"'),
    ],
)  # fmt: skip
def test_a_mistake_is_named_on_one_line(line: str, message: str) -> None:
    """With the flag as it was written, what it takes, and the nearest valid one."""
    with pytest.raises(ProfileError) as caught:
        parse_arguments(line.split())
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["[1]", "[{name=1}]"])
def test_tables_given_by_flag_contain_the_keys_of_the_table(text: str) -> None:
    """The error names the command line."""
    overrides = parse_arguments(["--actors", text]).overrides
    with pytest.raises(ProfileError, match=r"^command line: actors"):
        load_profile("local-m3", overrides)


@pytest.mark.parametrize(
    ("line", "topic"),
    [
        ("--help", ""),
        ("-h", ""),
        ("--nonsense --help", ""),
        ("--help learner", "learner"),
        ("--steps 3 --help-all", "all"),
        ("--help collapse-detection", "collapse_detection"),
    ],
)
def test_help_is_recognized_anywhere(line: str, topic: str) -> None:
    """The rest of the command line is not read, and may be wrong."""
    assert parse_arguments(line.split()) == Arguments(help=topic)
