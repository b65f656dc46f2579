"""A text search finds what a comparison of all texts finds, and reads each record at most once per new text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attachments.dashboard import growing_file, text_search
from attachments.dashboard.histories import Groups
from attachments.dashboard.text_search import FOLDED, KEPT_TEXTS, TextSearch
from clotho.storage.json_text import encode

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


def test_every_character_that_folds_to_ascii_is_known() -> None:
    """Records with one of them are decoded, because a search for bytes would not find their letters."""
    folding = {chr(code) for code in range(0x80, 0x110000) if any(one.isascii() for one in chr(code).casefold())}
    assert set(FOLDED) == folding


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

    monkeypatch.setattr(text_search, "read_part", counted)
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


def test_a_longer_text_is_searched_in_the_results_of_a_shorter_one(tmp_path: Path, reads: list[int]) -> None:
    """While a user types; records between two results are not read if there are many."""
    path = tmp_path / "rollouts.jsonl"
    other = record(1, "x" * 40_000)
    path.write_bytes(record(0, "a number") + other + record(2, "a name"))
    found = TextSearch(opened(path))
    assert search(found, "a n") == [0, 2]
    reads.clear()
    assert search(found, "a na") == [2]
    assert len(reads) == 2
    assert sum(reads) < len(other)


def test_the_blocks_of_a_search_are_bounded(tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call returns after some bytes, so that other requests can read the run."""
    path = tmp_path / "rollouts.jsonl"
    lines = [record(number, f"text {number}") for number in range(40)]
    path.write_bytes(b"".join(lines))
    monkeypatch.setattr(text_search, "BLOCK_BYTES", 200)
    monkeypatch.setattr(text_search, "CALL_BYTES", 1000)
    found, calls = TextSearch(opened(path)), 1
    while found.advance("text 3"):
        calls += 1
    assert found.group_ids("text 3") == [3, *range(30, 40)]
    assert max(reads) <= 200
    assert calls == -(-sum(reads) // 1000)


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
