"""Forms of datasets: CSV, Parquet, Arrow, directories, and the library `datasets`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, ipc, parquet

from clotho.data import records
from clotho.data.records import Source, read_records
from protocols.errors import DatasetError
from tests.damaged_files import read_damaged

ROWS = [{"prompt": "1+1?", "answer": "2", "level": 1}, {"prompt": 'a,b\n"c"', "answer": "é", "level": 2}]


@pytest.fixture
def datasets() -> Any:
    """The library, which takes a second to import."""
    return importlib.import_module("datasets")


def rows(path: Path, **source: str) -> list[Any]:
    """Read all records of a dataset."""
    return [record for _, record in read_records(Source(path=str(path), **source))]


def refusal(path: Path, **source: str) -> str:
    """Return the error message for a dataset."""
    with pytest.raises(DatasetError) as caught:
        rows(path, **source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.parametrize("form", ["parquet", "arrow file", "arrow stream", "feather"])
def test_columnar_files_have_the_rows_of_json_lines(tmp_path: Path, form: str) -> None:
    """Numbers keep their type, and null is no value."""
    table = pa.Table.from_pylist([*ROWS, {"prompt": "q", "answer": "a", "level": None}])
    path = tmp_path / f"data.{form.split()[0]}"
    match form:
        case "parquet":
            parquet.write_table(table, path)
        case "feather":
            feather.write_feather(table, path)
        case _:
            with (ipc.new_file if form == "arrow file" else ipc.new_stream)(path, table.schema) as writer:
                writer.write_table(table)
    assert rows(path) == [*ROWS, {"prompt": "q", "answer": "a"}]


def test_csv_files_have_a_row_of_names(tmp_path: Path) -> None:
    """Fields are text; quoted fields may contain commas and lines; an empty field is no value. TSV files have tabs."""
    expected = [{key: str(value) for key, value in row.items()} for row in ROWS]
    path = tmp_path / "data.csv"
    path.write_bytes('\ufeffprompt,answer,level\r\n1+1?,2,1\r\n"a,b\n""c""",é,2\r\n\r\nq,,3\r\n'.encode())
    assert rows(path) == [*expected, {"prompt": "q", "level": "3"}]
    tabs = tmp_path / "data.tsv"
    tabs.write_text("prompt\tanswer\na,b\tc\n")
    assert rows(tabs) == [{"prompt": "a,b", "answer": "c"}]


@pytest.mark.parametrize(
    ("contents", "place"),
    [
        (b"prompt,answer\nq,a\nq\n", "data.csv:3: "),
        (b"prompt,prompt\nq,a\n", "data.csv:1: "),
        (b'prompt,answer\n"q,a\n', "data.csv:2: "),
        (b"prompt,answer\nq,\xff\n", "byte 16"),
        (b"prompt,answer\n" + b"q" * (records.MAX_CSV_FIELD_CHARACTERS + 1) + b",a\n", "data.csv:2: "),
    ],
    ids=["missing field", "repeated name", "open quote", "not UTF-8", "long field"],
)
def test_a_malformed_row_of_a_csv_file_is_named(tmp_path: Path, contents: bytes, place: str) -> None:
    """With file and line."""
    path = tmp_path / "data.csv"
    path.write_bytes(contents)
    assert place in refusal(path)


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow", "data.feather"])
def test_a_damaged_columnar_file_is_refused(tmp_path: Path, name: str) -> None:
    """Also an empty one, one that expands beyond the limit, and one that is no regular file."""
    path = tmp_path / name
    for contents in (b"", b"PAR1", b"ARROW1\0\0" + bytes(64)):
        path.write_bytes(contents)
        assert name in refusal(path)


def damaged_outcomes(directory: Path, count: int) -> None:
    """Damage files of every columnar form so many times; each is refused in one line, or has rows."""
    table = pa.Table.from_pylist(
        [{**ROWS[n % 2], "n": n, "tags": ["a", "é"][: n % 3], "o": {"x": n}} for n in range(9)]
    )
    table = table.append_column("c", pa.array(["x", "y", "z"] * 3).dictionary_encode())
    table = table.append_column("v", pa.array([f"longer than a view holds {n}" for n in range(9)], pa.string_view()))
    forms = {"file": ipc.new_file, "stream": ipc.new_stream}
    for name, new in forms.items():
        with new(directory / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    feather.write_feather(table.drop_columns(["v"]), directory / "data.feather", compression="lz4")
    parquet.write_table(table, directory / "data.parquet")
    files = sorted(directory.iterdir())
    assert sorted(read_damaged("dataset", files, count, seed=0)) == ["loaded", "refused"]


def test_damaged_columnar_files_never_end_the_process(tmp_path: Path) -> None:
    """Bytes change, move, are lost, or become numbers at the limits of integers: offsets, lengths, counts, indices."""
    damaged_outcomes(tmp_path, 80)


@pytest.mark.slow
def test_a_thousand_damaged_columnar_files_never_end_the_process(tmp_path: Path) -> None:
    """As above."""
    damaged_outcomes(tmp_path, 1000)


def test_the_decoded_size_of_a_columnar_file_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small compressed file may expand a thousandfold."""
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"prompt": ["x" * 1000] * 1000}), path)
    monkeypatch.setattr(records, "MAX_BYTES", 200_000)
    assert path.stat().st_size < 200_000
    assert "when decoded" in refusal(path)


def test_a_directory_has_a_file_for_every_split(tmp_path: Path) -> None:
    """As in mlx-lm. A split without a name or without a file is refused."""
    write_lines(tmp_path / "train.jsonl", ROWS[:1])
    (tmp_path / "valid.csv").write_text("prompt,answer\nq,a\n")
    assert rows(tmp_path, split="train") == ROWS[:1]
    assert rows(tmp_path, split="valid") == [{"prompt": "q", "answer": "a"}]
    assert "data.train_split" in refusal(tmp_path)


def test_datasets_that_the_library_saved_are_read(tmp_path: Path, datasets: Any) -> None:
    """Of `save_to_disk`: one dataset, or one for every split."""
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one.select([0]), "test": one.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert rows(tmp_path / "one", split="train") == ROWS
    assert rows(tmp_path / "two", split="test") == ROWS[1:]
    assert "cannot be loaded" in refusal(tmp_path / "two", split="validation")


def test_a_dataset_of_the_hub_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    """With configuration and split; an error of the hub is one line."""
    calls: list[tuple[str, str | None, str]] = []

    def load(path: str, name: str | None, split: str) -> Any:
        calls.append((path, name, split))
        if split == "missing":
            raise ValueError("Unknown split\n'missing'")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert rows(Path("openai/gsm8k"), subset="main", split="train") == ROWS
    assert rows(Path("openai/gsm8k")) == ROWS
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", None, "train")]
    assert "openai/gsm8k cannot be loaded" in refusal(Path("openai/gsm8k"), split="missing")


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries of the extra `datasets` are not needed for JSON and CSV."""
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert records.INSTALL in refusal(Path("openai/gsm8k"))


def test_a_file_has_no_subset(tmp_path: Path) -> None:
    """The setting would have no effect."""
    write_lines(tmp_path / "train.jsonl", ROWS)
    assert "data.subset" in refusal(tmp_path / "train.jsonl", subset="main")
    assert "data.subset" in refusal(tmp_path, subset="main", split="train")
