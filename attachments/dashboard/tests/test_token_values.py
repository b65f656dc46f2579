"""Files of per-token values: what is written, in which form, within which limit, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save

from attachments.dashboard import token_values
from attachments.dashboard.token_values import CompletionTokens, TokenValueWriter, read_group, token_file, token_files
from clotho.training.objectives import kl
from protocols.errors import RunDirectoryError
from protocols.step import Cut, GroupsEnded, StepReport, TokenValues, TrainedGroup
from tests.training_run.records.display_examples import discarded, step, trained

TOKENS = 3
"""Tokens of every completion of the examples."""


def texts(tokens: Sequence[int], text: str) -> list[str]:
    """Give the last character to the last token, and the text before it to the first."""
    return [text[:-1], *[""] * (len(tokens) - 2), text[-1:]]


def values(learner_logprob: Sequence[float] = (-0.25, -0.5, -1.0)) -> TokenValues:
    """Return the values of a completion of three tokens."""
    return TokenValues(
        learner_logprob=np.array(learner_logprob, dtype="<f4").tobytes(),
        advantage=np.array([1.5] * TOKENS, dtype="<f4").tobytes(),
        cut=bytes([Cut.NONE, Cut.CLIP, Cut.CORRECTION]),
        gradient_share=np.array([0.75, 0.0, 0.25], dtype="<f4").tobytes(),
    )


def group(number: int, text: str = "What?") -> TrainedGroup:
    """Return a group of two completions that was trained on."""
    return replace(trained(number, text=text), tokens=(values(), values((-5.0, -0.5, -0.5))))


def writer(run: Path, *, limit_bytes: int = 1 << 20) -> TokenValueWriter:
    """Return the writer of a run."""
    return TokenValueWriter(run / "tokens", limit_bytes=limit_bytes, texts=texts)


def write(run: Path, report: StepReport) -> None:
    """Write the file of a step."""
    one = writer(run)
    one.step(report, {})
    one.write()


def test_a_file_has_the_tokens_of_all_groups_that_ended_with_the_step(tmp_path: Path) -> None:
    """Trained groups first, then discarded ones; types and lengths are those of the format."""
    write(tmp_path, step(7, groups=(group(4, "漢字"), group(5)), discarded=(discarded(6),)))
    path = token_file(tmp_path / "tokens", 7)
    assert path.name == "step-000007.safetensors"
    arrays = load_file(path)
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"step": "7", "format": "1"}
    assert {name: (str(array.dtype), len(array)) for name, array in arrays.items()} == {
        "completion_group": ("int64", 6), "completion_index": ("int32", 6), "completion_start": ("int64", 7),
        "token": ("int32", 18), "text_start": ("int64", 19), "text": ("uint8", 2 * 6 + 2 * 5 + 2 * 18),
        "version": ("int32", 18), "sampled_logprob": ("float32", 18), "learner_logprob": ("float32", 18),
        "ratio": ("float32", 18), "advantage": ("float32", 18), "cut": ("uint8", 18),
        "gradient_share": ("float32", 18),
    }  # fmt: skip
    assert arrays["completion_group"].tolist() == [4, 4, 5, 5, 6, 6]
    assert arrays["completion_start"].tolist() == [0, 3, 6, 9, 12, 15, 18]
    assert bytes(arrays["text"][:6]).decode() == "漢字"


def test_a_completion_that_is_read_has_the_values_that_were_written(tmp_path: Path) -> None:
    """The importance ratio follows from both log-probabilities; sampled ones are -0.5."""
    write(tmp_path, step(1, groups=(group(0, "né"), group(3))))
    expected = CompletionTokens(
        tokens=(0, 1, 2),
        text=("n", "", "é"),
        version=(1, 1, 2),
        sampled_logprob=(-0.5, -0.5, -0.5),
        learner_logprob=(-0.25, -0.5, -1.0),
        ratio=tuple(float(np.exp(np.float32(x))) for x in (0.25, 0.0, -0.5)),
        advantage=(1.5, 1.5, 1.5),
        cut=(0, 1, 2),
        gradient_share=(0.75, 0.0, 0.25),
    )
    assert read_group(tmp_path, 1, 0)[0] == expected
    second = read_group(tmp_path, 1, 3)[1]
    assert second is not None
    assert second.learner_logprob == (-5.0, -0.5, -0.5)


def test_a_discarded_group_has_what_the_sampler_recorded(tmp_path: Path) -> None:
    """Values that do not exist are null in JSON, never 0."""
    write(tmp_path, step(1, discarded=(discarded(9), discarded(10, sampled=False))))
    first, second = read_group(tmp_path, 1, 9)
    assert first == second
    assert first is not None
    found = msgspec.json.decode(msgspec.json.encode(first))
    assert found["sampled_logprob"] == [-0.5] * TOKENS
    assert found["learner_logprob"] == found["ratio"] == found["advantage"] == [None] * TOKENS
    assert found["cut"] == [Cut.NOT_TRAINED] * TOKENS
    assert found["gradient_share"] == [0.0] * TOKENS


def test_tokens_of_an_environment_have_no_log_probability(tmp_path: Path) -> None:
    """The policy did not sample them; the message contains 0."""
    one = group(0)
    first, second = one.scored.group.completions
    completions = (replace(first, sampled=(False, True, True)), second)
    scored = replace(one.scored, group=replace(one.scored.group, completions=completions))
    write(tmp_path, step(1, groups=(replace(one, scored=scored),)))
    found = read_group(tmp_path, 1, 0)[0]
    assert found is not None
    assert (found.sampled_logprob, found.ratio[0]) == ((None, -0.5, -0.5), None)


def test_ratios_are_finite(tmp_path: Path) -> None:
    """Log-ratios are bounded as in the loss."""
    one = replace(group(0), tokens=(values((500.0, -600.0, 0.0)), values()))
    write(tmp_path, step(1, groups=(one,)))
    found = read_group(tmp_path, 1, 0)[0]
    assert found is not None
    assert found.ratio[:2] == pytest.approx((np.exp(20.0), np.exp(-20.0)))
    assert token_values.MAX_LOG_RATIO == kl.MAX_LOG_RATIO


def test_groups_that_end_between_two_batches_are_in_the_file_of_the_next_step(tmp_path: Path) -> None:
    """Those that end after the last batch have a file of their own; a step without completions has none."""
    one = writer(tmp_path)
    one.groups(GroupsEnded(step=2, discarded=(discarded(1),)))
    assert token_files(tmp_path / "tokens") == {}
    one.step(step(2, groups=(group(0),)), {})
    one.write()
    assert len(read_group(tmp_path, 2, 1)) == 2
    one.step(step(3), {})
    one.write()
    one.groups(GroupsEnded(step=4, discarded=(discarded(5),)))
    one.write()
    assert list(token_files(tmp_path / "tokens")) == [2, 4]
    assert len(read_group(tmp_path, 4, 5)) == 2


def test_values_that_cannot_be_written_are_lost_and_later_ones_are_not(tmp_path: Path) -> None:
    """The monitor reports the error under the name of the directory."""
    (tmp_path / "tokens").touch()
    one = writer(tmp_path)
    one.step(step(1, discarded=(discarded(1),)), {})
    with pytest.raises(OSError, match="tokens"):
        one.write()
    (tmp_path / "tokens").unlink()
    one.step(step(2, discarded=(discarded(2),)), {})
    one.write()
    assert one.name == "tokens"
    assert list(token_files(tmp_path / "tokens")) == [2]


def test_the_oldest_files_are_deleted_above_the_limit(tmp_path: Path) -> None:
    """The sum of all files stays within the limit, and the reader says why values are missing."""
    write(tmp_path / "sizes", step(1, groups=(group(0),)))
    size = token_file(tmp_path / "sizes" / "tokens", 1).stat().st_size
    one = writer(tmp_path, limit_bytes=3 * size + size // 2)
    for number in range(1, 6):
        one.step(step(number, groups=(group(number),)), {})
        one.write()
    assert list(token_files(tmp_path / "tokens")) == [3, 4, 5]
    with pytest.raises(RunDirectoryError, match="deleted"):
        read_group(tmp_path, 2, 2)


def test_a_step_does_not_read_the_directory_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a step is constant, however many files a long run has. The files of a resumed run count too."""
    write(tmp_path, step(1, groups=(group(0),)))
    size = token_file(tmp_path / "tokens", 1).stat().st_size
    one, read = writer(tmp_path, limit_bytes=3 * size + size // 2), list[Path]()

    def counted(directory: Path) -> dict[int, Path]:
        read.append(directory)
        return token_files(directory)

    monkeypatch.setattr(token_values, "token_files", counted)
    for number in (2, 3, 3, 4, 5):
        one.step(step(number, groups=(group(number),)), {})
        one.write()
    assert read == [tmp_path / "tokens"]
    assert list(token_files(tmp_path / "tokens")) == [3, 4, 5]


def test_a_step_that_exceeds_the_limit_keeps_its_last_groups(tmp_path: Path) -> None:
    """No group is kept in part."""
    limit = token_values.HEADER_BYTES + 4000
    one = writer(tmp_path, limit_bytes=limit)
    one.step(step(1, groups=tuple(map(group, range(20)))), {})
    one.write()
    path = token_file(tmp_path / "tokens", 1)
    assert path.stat().st_size <= limit
    kept = load_file(path)["completion_group"].tolist()
    assert kept
    assert kept == [number for number in range(min(kept), 20) for _ in range(2)]
    with pytest.raises(RunDirectoryError, match="dropped"):
        read_group(tmp_path, 1, 0)


def test_missing_and_damaged_files_are_explained(tmp_path: Path) -> None:
    """One line says whether the values are off, or what is wrong with the file."""
    with pytest.raises(RunDirectoryError, match="token_values_mb was 0"):
        read_group(tmp_path, 1, 0)
    write(tmp_path, step(1, groups=(group(0),)))
    path = token_file(tmp_path / "tokens", 1)
    with pytest.raises(RunDirectoryError, match="no per-token values of step 2"):
        read_group(tmp_path, 2, 0)
    arrays = load_file(path)
    wrong: dict[str, NDArray[Any]] = {
        "completion_start": np.array([0, 1 << 40, 1 << 41]), "text_start": np.array([9, 1, 2]),
        "text": np.full(10, 255, np.uint8), "token": np.zeros(0, np.int32), "cut": np.zeros((2, 2)),
    }  # fmt: skip
    for content in (path.read_bytes()[:100], b"", *(save({**arrays, name: array}) for name, array in wrong.items())):
        path.write_bytes(content)
        with pytest.raises(RunDirectoryError, match="cannot be read") as caught:
            read_group(tmp_path, 1, 0)
        assert "\n" not in str(caught.value)


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A run directory can come from outside."""
    write(tmp_path / "run", step(1, groups=(group(0),)))
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "tokens").symlink_to(tmp_path / "run" / "tokens")
    with pytest.raises(RunDirectoryError, match="link"):
        read_group(tmp_path / "hostile", 1, 0)
