"""The prompts of a run are a function of dataset and seed and exclude held-out problems."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import convert

from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import DatasetError, ModelError
from protocols.evaluation import Grade, HeldOut
from protocols.prompt import Problem, group_seed
from protocols.sampling import Completion
from tests.fakes import CharacterTokenizer
from tests.small_models import byte_tokenizer
from training_run.groups.prompts import (
    LoadedPrompts,
    PromptBuilder,
    dataset_warnings,
    inspect_dataset,
    load_prompts,
    read_split,
)
from training_run.profile.mounted import with_attachments
from training_run.profile.schema import Profile


async def grade(problem: Problem, completions: Sequence[Completion]) -> list[Grade]:
    """Unused by these tests."""
    raise AssertionError


def profile_of(directory: Path, *, seed: int = 0, **data: Any) -> Profile:
    """A profile that trains on `train.jsonl` of a directory. data: other settings of [data]."""
    settings = {
        "model": {"path": "base"},
        "data": {"train": str(directory / "train.jsonl"), **data},
        "rewards": [{"name": "exact", "correct": True}],
        "seed": seed,
    }
    return convert(settings, with_attachments(Profile))


def load(
    directory: Path, *, count: int = 20, seed: int = 0, tokenizer: ChatTokenizer | None = None, **data: Any
) -> tuple[PromptBuilder, HeldOut]:
    """Return the prompts of a file with this number of problems."""
    path = directory / "train.jsonl"
    lines = [json.dumps({"prompt": f"1 + {i}?", "answer": str(1 + i), "type": "sum"}) for i in range(count)]
    path.write_text("\n".join(lines))
    profile = profile_of(directory, seed=seed, **data)
    loaded = loaded_prompts(profile, tokenizer)
    return loaded.builder, loaded.held_out


def loaded_prompts(profile: Profile, tokenizer: ChatTokenizer | None = None) -> LoadedPrompts:
    """Load the prompts of a profile, by default with one token per character."""
    used = tokenizer or cast(ChatTokenizer, CharacterTokenizer())
    return load_prompts(read_split(profile), profile, used, grade, longest=1000, say=lambda line: None)


def test_a_prompt_depends_only_on_seed_and_group_id(tmp_path: Path) -> None:
    """A resumed run repeats its prompts. Another seed gives another order and other sampling seeds."""
    first, _ = load(tmp_path)
    again, _ = load(tmp_path)
    other, _ = load(tmp_path, seed=1)
    numbers = [40, 3, 17, 3]
    assert [first.prompt(n) for n in numbers] == [again.prompt(n) for n in reversed(numbers)][::-1]
    assert [first.prompt(n).problem for n in range(18)] != [other.prompt(n).problem for n in range(18)]
    prompt = first.prompt(40)
    assert (prompt.group_id, prompt.seed) == (40, group_seed(0, 40))
    assert prompt.seed != other.prompt(40).seed


def test_every_problem_is_used_once_per_epoch(tmp_path: Path) -> None:
    """Held-out problems are never used."""
    questions, held_out = load(tmp_path, heldout_fraction=0.1)
    epochs = [[questions.prompt(18 * epoch + i).problem.prompt for i in range(18)] for epoch in range(2)]
    assert [set(Counter(epoch).values()) for epoch in epochs] == [{1}, {1}]
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]
    assert {problem.prompt for problem in held_out.problems}.isdisjoint(epochs[0])
    assert len(held_out.problems) == 2


def test_problems_are_rendered_as_conversations(tmp_path: Path) -> None:
    """With the system prompt, if set. Held-out problems are rendered in the same way."""
    tokenizer = CharacterTokenizer()
    questions, held_out = load(tmp_path, shuffle=False, system="Be brief.")
    prompt = questions.prompt(0)
    assert tokenizer.decode(prompt.tokens) == f"system: Be brief.\nuser: {prompt.problem.prompt}\nassistant: "
    for problem, tokens in zip(held_out.problems, held_out.prompts, strict=True):
        assert tokenizer.decode(tokens) == f"system: Be brief.\nuser: {problem.prompt}\nassistant: "
    plain, _ = load(tmp_path, shuffle=False)
    assert tokenizer.decode(plain.prompt(0).tokens) == f"user: {prompt.problem.prompt}\nassistant: "


def test_reference_completions_are_rendered_as_the_policy_writes_them(tmp_path: Path) -> None:
    """After the prompt, up to the end token. Empty without one, or if the template changes the prompt."""
    records = [{"prompt": "a?", "answer": "b", "completion": "It is b."}, {"prompt": "c?", "answer": "d"}]
    path = tmp_path / "heldout.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    turns = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}a:{% endif %}"
    _, held_out = load(tmp_path, heldout=str(path), tokenizer=byte_tokenizer(chat_template=template))
    assert list(held_out.references) == [(*b"It is b.", 256), ()]
    numbered = "{{ messages | length }}" + template
    _, held_out = load(tmp_path, heldout=str(path), tokenizer=byte_tokenizer(chat_template=numbered))
    assert list(held_out.references) == [(), ()]
    _, held_out = load(tmp_path, heldout=str(path))
    assert CharacterTokenizer().decode(held_out.references[0]) == "It is b.\n"


def test_with_a_held_out_file_all_other_problems_are_trained_on(tmp_path: Path) -> None:
    """The training file and the held-out file are used completely."""
    path = tmp_path / "heldout.jsonl"
    path.write_text('{"prompt": "2 + 2?", "answer": 4}')
    questions, held_out = load(tmp_path, heldout=str(path))
    assert len({questions.prompt(n).problem.prompt for n in range(20)}) == 20
    assert [problem.answer for problem in held_out.problems] == ["4"]


def test_invalid_files_are_reported(tmp_path: Path) -> None:
    """With file and line of the problem. A tokenizer without a chat template is reported as an error of the model."""
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}')
    with pytest.raises(DatasetError, match=r"bad\.jsonl:2: no key 'answer'"):
        load(tmp_path, heldout=str(tmp_path / "bad.jsonl"))
    tokenizer: ChatTokenizer = byte_tokenizer()
    with pytest.raises(ModelError, match="chat template"):
        load(tmp_path, tokenizer=tokenizer)


def test_a_template_with_unbounded_work_is_refused(tmp_path: Path) -> None:
    """The run ends before it starts, with the error of a request to the same template."""
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ModelError, match="limit"):
        load(tmp_path, tokenizer=byte_tokenizer(chat_template=template))


def test_long_prompts_are_removed_and_counted(tmp_path: Path) -> None:
    """From training and from the held-out problems. A limit that removes every problem is refused."""
    long = {"prompt": "x" * 300, "answer": "", "type": "sum"}
    short = {"prompt": "1 + 1?", "answer": "2", "type": "sum"}
    for name, records in (("train", [short, long, short]), ("heldout", [long, short])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    profile = profile_of(tmp_path, heldout=str(tmp_path / "heldout.jsonl"), max_prompt_tokens=100)
    loaded = loaded_prompts(profile)
    assert (loaded.prompts.removed, loaded.prompts.removed_heldout, loaded.prompts.longest) == (1, 1, 24)
    assert (loaded.dataset.duplicates, loaded.dataset.overlap) == (1, 2)
    assert len(dataset_warnings(loaded)) == 2
    assert {loaded.builder.prompt(group).problem.prompt for group in range(4)} == {"1 + 1?"}
    with pytest.raises(DatasetError, match="max_prompt_tokens"):
        loaded_prompts(profile_of(tmp_path, max_prompt_tokens=1))


def test_weights_of_types_determine_the_prompts(tmp_path: Path) -> None:
    """A type of weight 0 is not trained on; an unknown type is refused with the key."""
    records = [{"prompt": f"{kind} {n}", "answer": "", "type": kind} for kind in ("easy", "hard") for n in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    profile = profile_of(tmp_path, heldout_fraction=0.0, type_weights={"easy": 0.0})
    builder = loaded_prompts(profile).builder
    assert {builder.prompt(group).problem.type for group in range(9)} == {"hard"}
    with pytest.raises(DatasetError, match=r"data\.type_weights"):
        inspect_dataset(profile_of(tmp_path, type_weights={"esay": 2.0}), None)


def test_a_split_of_a_directory_can_be_held_out(tmp_path: Path) -> None:
    """`data.heldout_split` names another split of the same dataset."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": split, "answer": ""}))
    dataset, prompts = inspect_dataset(profile_of(tmp_path, train=str(tmp_path), heldout_split="test"), None)
    assert (dataset.problems, dataset.heldout, dataset.overlap, prompts) == ({"problem": 1}, 1, 0, None)
    file = str(tmp_path / "train.jsonl")
    with pytest.raises(DatasetError, match=r"data\.heldout_split"):
        inspect_dataset(profile_of(tmp_path, train=file, heldout_split="test"), None)
    with pytest.raises(DatasetError, match=r"data\.train_split"):
        inspect_dataset(profile_of(tmp_path, train=file, train_split="test", heldout=file), None)


@pytest.mark.needs_extra("reasoning-gym")
def test_problems_of_reasoning_gym_are_held_out_by_prompt(tmp_path: Path) -> None:
    """A held-out dataset with the same table has no prompt of the training problems. It has no splits."""
    path, tables = (
        "reasoning_gym:few",
        [{"name": "few", "dataset": "products", "size": 60, "settings": {"max_digits": 1}}],
    )
    profile = profile_of(tmp_path, train=path, heldout=path, reasoning_gym=tables)
    dataset, _ = inspect_dataset(profile, None)
    assert (dataset.problems, dataset.overlap, dataset.duplicates) == ({"few": 60}, 0, 0)
    assert 0 < dataset.heldout <= 40
    assert inspect_dataset(profile, None)[0].fingerprint == dataset.fingerprint
    with pytest.raises(DatasetError, match="splits"):
        inspect_dataset(profile_of(tmp_path, train=path, reasoning_gym=tables, heldout_split="test"), None)
