"""The estimate's lines, and the refusal."""

from __future__ import annotations

import msgspec

from clotho.config.keys import flag_key
from clotho.memory.report import PARTS, describe, too_large
from protocols.summary import MemoryEstimate

ESTIMATE = MemoryEstimate(
    base=4 * 2**30,
    trained=10,
    optimizer=30,
    reference=0,
    rollback=15,
    midway=5,
    caches=2**30,
    prefixes=40,
    gradients=20,
    activations=3 * 2**30,
    logits=5 * 2**30,
    update=9 * 2**30 // 2,
    decode=7 * 2**30,
    margin=2 * 2**30,
    one_sequence=2**20,
)


def test_the_total_takes_the_largest_of_what_takes_turns() -> None:
    """Backward pass, optimizer step and decoding step never happen at once."""
    assert ESTIMATE.total == 15 * 2**30 + 120
    assert msgspec.structs.replace(ESTIMATE, decode=9 * 2**30).total == 16 * 2**30 + 100


def test_every_part_has_a_line_with_something_to_change() -> None:
    """Empty parts are left out; none of the fields is forgotten."""
    lines = describe(ESTIMATE)
    sizes = msgspec.structs.asdict(ESTIMATE)
    assert not sizes.pop("shipped_shape")
    del sizes["one_sequence"]
    assert [line.bytes for line in lines] == [value for value in sizes.values() if value]
    assert [name for name, _, _ in PARTS] == list(sizes)
    assert all(line.change for line in lines)


def test_the_settings_that_are_named_exist() -> None:
    """Each `section.key` of a suggestion is a key of the profile."""
    for _, _, change in PARTS:
        named = [word.strip("(,;)") for word in change.split() if "." in word]
        assert named
        assert [key for key in named if flag_key(key) is None] == []


def test_a_run_that_fits_is_not_refused() -> None:
    """The cache of one sequence must fit: the lengths of completions decide how full the caches get."""
    assert too_large(ESTIMATE, ESTIMATE.minimum) is None
    assert too_large(ESTIMATE, ESTIMATE.minimum - 1) is not None


def test_a_run_that_does_not_fit_is_refused_in_one_line_that_names_the_largest_counted_part() -> None:
    """The decoding step is larger but takes its turn while the backward pass does not: the logits are to blame."""
    refusal = too_large(ESTIMATE, 8 * 2**30)
    assert refusal is not None
    message = str(refusal)
    assert all(words in message for words in ("at least 14.0 GiB", "has 8.0", "logits", "learner.micro_batch_tokens"))
    assert "\n" not in message
