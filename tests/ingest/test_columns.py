"""Parquet and Arrow: the text column of any layout, and what is refused."""

from __future__ import annotations

import errno
import gzip
import io
import json
import tempfile

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from documents_of import documents_of, forward_only, refusal, write

from lit_llm.core.errors import UserError
from lit_llm.ingest.paths import dataset_files
from lit_llm.ingest.readers import DocumentReader, ReadSettings, interface
from lit_llm.ingest.source import Source

TEXTS = ["first", None, "", "é😀\n" * 1000, "last"]
DOCUMENTS = [text.encode() for text in TEXTS if text]


def parquet(table: pa.Table, **options) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def arrow_file(table: pa.Table, **options) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


def arrow_stream(table: pa.Table, **options) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


WRITERS = {"parquet": parquet, "arrow_file": arrow_file, "arrow_stream": arrow_stream}
each_writer = pytest.mark.parametrize("writer", WRITERS.values(), ids=list(WRITERS))


def table_of(texts: list, kind: pa.DataType | None = None, name: str = "text") -> pa.Table:
    return pa.table({"id": list(range(len(texts))), name: pa.array(texts, kind), "z": [[1.5]] * len(texts)})


@each_writer
@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.large_string()),
        pa.large_binary(),
    ],
    ids=str,
)
def test_strings_of_every_kind_are_read(tmp_path, writer, kind):
    path = write(tmp_path, writer(table_of(TEXTS, kind)), "a.txt")
    assert documents_of(path) == DOCUMENTS
    with DocumentReader(Source.local(path), ReadSettings()) as reader:
        list(reader)
        assert reader.skipped == 2
        assert reader.position == path.stat().st_size
        assert reader.format == ("parquet" if writer is parquet else "arrow")


@pytest.mark.parametrize(
    "content",
    [
        parquet(table_of(TEXTS, pa.dictionary(pa.int8(), pa.string())), row_group_size=2),
        arrow_stream(table_of(TEXTS), compression="lz4"),
        gzip.compress(parquet(table_of(TEXTS))),
        gzip.compress(arrow_file(table_of(TEXTS))),
    ],
    ids=["dictionaries of row groups", "stream lz4", "parquet gz", "file gz"],
)
def test_other_ways_of_writing_a_table_are_read(tmp_path, content):
    assert documents_of(write(tmp_path, content)) == DOCUMENTS


@each_writer
def test_columns_of_structs_are_named_with_dots_and_a_null_struct_has_no_text(tmp_path, writer):
    meta = pa.array([{"body": "a", "n": 1}, None, {"body": None, "n": 2}, {"body": "b", "n": 3}])
    deep = pa.array([{"x": {"y.z": f"{i}"}} for i in range(4)])
    table = pa.table({"meta": meta.slice(0), "deep": deep, "deep.x": ["dotted"] * 4})
    path = write(tmp_path, writer(table))
    assert documents_of(path, text_key="meta.body") == [b"a", b"b"]
    assert documents_of(path, text_key="deep.x.y.z") == [b"0", b"1", b"2", b"3"]
    assert documents_of(path, text_key="deep.x") == [b"dotted"] * 4
    message = refusal(path, text_key="meta.text")
    assert "no column 'meta.text'" in message
    assert "deep, deep.x, meta.body, meta.n" in message


def test_each_row_group_has_a_dictionary_of_its_own_in_a_struct(tmp_path):
    body = pa.array(["a", "b", "c", "d"]).dictionary_encode()
    table = pa.table({"meta": pa.StructArray.from_arrays([body], ["body"])})
    assert documents_of(write(tmp_path, parquet(table, row_group_size=2)), text_key="meta.body") == [b"a", b"b", b"c", b"d"]


@each_writer
def test_a_long_cell_comes_in_pieces(tmp_path, monkeypatch, writer):
    monkeypatch.setattr(interface, "PIECE_BYTES", 500)
    path = write(tmp_path, writer(table_of(TEXTS)))
    with DocumentReader(Source.local(path), ReadSettings()) as reader:
        found = list(reader)
    assert len(found) > 10
    assert max(len(piece.text) for piece in found) <= 1000
    assert b"".join(piece.text for piece in found) == b"".join(DOCUMENTS)
    assert sum(piece.last for piece in found) == len(DOCUMENTS)


@each_writer
@pytest.mark.parametrize(
    ("texts", "kind", "words"),
    [
        ([1, 2], None, ["int64", "'text'", "strings", "--data.text_key"]),
        ([["a"], ["b"]], None, ["list", "strings"]),
        (["ok", b"caf\xe9!"], pa.binary(), ["row 2", "UTF-8"]),
    ],
)
def test_other_columns_are_refused(tmp_path, writer, texts, kind, words):
    message = refusal(write(tmp_path, writer(table_of(texts, kind))))
    assert [word for word in words if word not in message] == []


@each_writer
def test_a_truncated_table_is_one_sentence(tmp_path, writer):
    whole = writer(table_of(["first", None, "é" * 50, "last"]))
    # At every place after the first bytes, which say what it is: also between two messages, where pyarrow sees no error.
    for length in range(12 if writer is not parquet else 4, len(whole), 9):
        assert "truncated" in refusal(write(tmp_path, whole[:length])), length
    assert "truncated" in refusal(write(tmp_path, whole[:-1]))
    assert "truncated" in refusal(write(tmp_path, whole[:-8]))


def test_two_arrow_streams_in_a_file_are_refused(tmp_path):
    assert "file of its own" in refusal(write(tmp_path, arrow_stream(table_of(TEXTS)) * 2))


def test_a_damaged_page_is_one_sentence(tmp_path):
    content = bytearray(parquet(table_of(["text " * 10_000]), compression="zstd", use_dictionary=False))
    at = content.index(b"\x28\xb5\x2f\xfd", content.index(b"\x28\xb5\x2f\xfd") + 1)  # the second page: that of the text
    content[at : at + 20] = bytes(20)
    assert "damaged" in refusal(write(tmp_path, bytes(content)))


@each_writer
def test_a_source_that_cannot_seek_is_read(monkeypatch, writer):
    with DocumentReader(forward_only(monkeypatch, writer(table_of(TEXTS))), ReadSettings()) as reader:
        assert b"".join(piece.text for piece in reader) == b"".join(DOCUMENTS)


def test_a_full_disk_is_an_error_that_names_the_folder_of_temporary_files(monkeypatch):
    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with (
        DocumentReader(forward_only(monkeypatch, parquet(table_of(TEXTS))), ReadSettings()) as reader,
        pytest.raises(OSError, match=tempfile.gettempdir()) as caught,
    ):
        list(reader)
    assert caught.value.errno == errno.ENOSPC


# ---- Folders of Hugging Face datasets -----------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return pytest.importorskip("datasets")


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path, hub):
    texts = [f"text {i}" for i in range(10)]
    dataset = hub.Dataset.from_dict({"n": list(range(10)), "text": texts})
    dataset.save_to_disk(tmp_path / "plain", num_shards=3)
    dataset.shuffle(seed=1).save_to_disk(tmp_path / "shuffled")
    files = dataset_files(tmp_path / "plain")
    assert [path.name for path in files] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    assert [text.decode() for path in files for text in documents_of(path)] == texts
    shuffled = [text.decode() for path in dataset_files(tmp_path / "shuffled") for text in documents_of(path)]
    assert shuffled == dataset.shuffle(seed=1)["text"][:]
    assert dataset_files(tmp_path) is None


def test_a_saved_dataset_that_cannot_be_read_as_it_is_is_refused(tmp_path, hub):
    dataset = hub.Dataset.from_dict({"text": ["a", "b"]})
    hub.DatasetDict({"train": dataset, "validation": dataset}).save_to_disk(tmp_path / "d")
    with pytest.raises(UserError, match=f"--data.train {tmp_path}/d/train --data.val {tmp_path}/d/validation"):
        dataset_files(tmp_path / "d")
    assert len(dataset_files(tmp_path / "d" / "train")) == 1
    [file] = dataset_files(tmp_path / "d" / "validation")
    file.unlink()
    with pytest.raises(UserError, match="missing"):
        dataset_files(tmp_path / "d" / "validation")
    state = tmp_path / "d" / "train" / "state.json"
    old = json.loads(state.read_text()) | {"_indices_data_files": [{"filename": "indices.arrow"}]}  # datasets before 2.0
    state.write_text(json.dumps(old))
    with pytest.raises(UserError, match="flatten_indices"):
        dataset_files(tmp_path / "d" / "train")
    state.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        dataset_files(tmp_path / "d" / "train")
