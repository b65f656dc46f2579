"""A text search finds what a comparison of all texts finds, and reads each record at most once per new text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attachments.dashboard import growing_file, run_files
from attachments.dashboard.histories import Groups
from attachments.dashboard.run_files import KEPT_TEXTS, TextSearch
from training_run.directory.jsonl import encode

FOLDED = "ßİŉſﬁ\N{KELVIN SIGN}"
"""Characters whose form without upper case has letters of ASCII."""

LETTERS = st.text(alphabet=st.sampled_from([*'aAbsSiI \n"\\/é数', *FOLDED, "É", "\u202e"]), max_size=6)


def record(number: int, *texts: str) -> bytes:
    """One line of rollouts.jsonl, whose first text is the prompt."""
    prompt, *completions = texts
    line = {"group_id": number, "step": 1, "prompt": prompt, "completions": [{"text": text} for text in completions]}
    return encode(line) + b"\n"


def opened(path: Path) -> Groups:
    """The index of the groups in a file."""
    groups = Groups(path)
    groups.read_all()
    return groups


def search(found: TextSearch, text: str) -> list[int]:
    """Search to the end."""
    while found.advance(text.casefold()):
        pass
    return found.group_ids(text.casefold())


def compare(path: Path, rows: Sequence[Sequence[str]], wanted: Sequence[str]) -> None:
    """Every search equals the comparison of all texts."""
    path.write_bytes(b"".join(record(number, *texts) for number, texts in enumerate(rows)))
    found = TextSearch(opened(path))
    for text in filter(None, wanted):
        folded = text.casefold()
        expected = [number for number, texts in enumerate(rows) if any(folded in one.casefold() for one in texts)]
        assert search(found, text) == expected, text


@settings(max_examples=60)
@example([["Straße"], ["STRASSE", "ﬁne"], ['"quoted" \\path/']], ["strasse", "FI", 'd" \\p', "h/", "\u212a"])
@given(st.lists(st.lists(LETTERS, min_size=1, max_size=3), max_size=5), st.lists(LETTERS, max_size=5))
def test_a_search_equals_the_comparison_of_all_texts(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], wanted: list[str]
) -> None:
    """Without upper case, as `str.casefold` compares; with escapes, and characters that fold to several."""
    compare(tmp_path_factory.getbasetemp() / "searched.jsonl", rows, wanted)


def test_escapes_of_other_writers_are_decoded(tmp_path: Path) -> None:
    """JSON allows an escape for every character, and one more for a slash."""
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(rb'{"group_id": 3, "step": 1, "prompt": "\u0041b<\/answer>"}' + b"\n")
    found = TextSearch(opened(path))
    assert search(found, "ab<") == search(found, "B</ANSWER>") == [3]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of a search."""
    sizes = list[int]()
    read = growing_file.read_part

    def counted(path: Path, offset: int, size: int) -> bytes | None:
        sizes.append(size)
        return read(path, offset, size)

    monkeypatch.setattr(run_files, "read_part", counted)
    return sizes


def test_a_repeated_search_reads_new_records_only(tmp_path: Path, reads: list[int]) -> None:
    """A page repeats its search whenever groups of a live run end."""
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(record(0, "one") + record(1, "two"))
    groups = opened(path)
    found = TextSearch(groups)
    assert search(found, "o") == [0, 1]
    assert search(found, "o") == [0, 1]
    assert sum(reads) < path.stat().st_size
    reads.clear()
    with path.open("ab") as lines:
        lines.write(added := record(2, "zero"))
    groups.read_all()
    assert search(found, "o") == [0, 1, 2]
    assert reads == [len(added) - 1]


def test_the_blocks_of_a_search_are_bounded(tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call reads some records, so that other requests can read the run; a longer one is read alone."""
    path = tmp_path / "rollouts.jsonl"
    lines = [record(number, f"text {number}") for number in range(40)] + [record(40, "text 3" + "x" * 500)]
    path.write_bytes(b"".join(lines))
    monkeypatch.setattr(run_files, "CALL_BYTES", 200)
    found, calls = TextSearch(opened(path)), 1
    while found.advance("text 3"):
        calls += 1
    assert found.group_ids("text 3") == [3, *range(30, 41)]
    assert max(reads[:-1]) <= 200
    assert reads[-1] == len(lines[-1]) - 1
    assert calls == len(reads)


def test_the_results_of_few_texts_are_kept(tmp_path: Path, reads: list[int]) -> None:
    """The latest ones; those of another text are searched again."""
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(record(0, "abcdefghijklmnop"))
    found = TextSearch(opened(path))
    for text in "abcdefghijklmnop"[: KEPT_TEXTS + 1]:
        assert search(found, text) == [0]
    assert len(reads) == KEPT_TEXTS + 1
    assert search(found, "b") == [0]
    assert len(reads) == KEPT_TEXTS + 1
    assert search(found, "a") == [0]
    assert len(reads) == KEPT_TEXTS + 2


def test_a_replaced_file_is_searched_again_and_dropped_groups_are_not_found(tmp_path: Path) -> None:
    """Results belong to the file that they were found in, and to the groups that the index still has."""
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"".join(record(number, "same") for number in range(6)))
    groups = Groups(path, max_cells=15 * 4)
    groups.read_all()
    found = TextSearch(groups)
    kept = groups.column("group_id")
    assert 0 < len(kept) < 6
    assert search(found, "s") == kept
    path.unlink()
    path.write_bytes(record(9, "same"))
    groups.read_all()
    assert search(found, "s") == [9]
