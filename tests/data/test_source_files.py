"""Which files have changed since a checkpoint."""

from lit_llm.data import TextFiles
from lit_llm.data.corpus import file_changes
from lit_llm.data.stored_files import StoredFile, StoredFiles


def test_changed_new_and_missing_files_are_named_and_moved_ones_are_not(tmp_path):
    def seen() -> dict[str, list[str]]:
        files = StoredFiles(StoredFile(str(path)) for path in sorted(tmp_path.iterdir()))
        assert list(files.problems()) == []
        return files.seen

    for name, content in {"one": b"1", "two": b"2", "three": b"3", "four": b"4", "same": b"5"}.items():
        (tmp_path / name).write_bytes(content)
    before = seen()
    (tmp_path / "two").write_bytes(b"x")  # as long as before
    (tmp_path / "three").unlink()
    (tmp_path / "four").rename(tmp_path / "vier")
    (tmp_path / "same").write_bytes(b"5")
    (tmp_path / "five").write_bytes(b"6")
    names = [change.replace(f"{tmp_path}/", "") for change in file_changes(before, seen())]
    assert names == ["two has changed", "three is gone", "five is new"]
    assert file_changes(before, before) == []


def test_a_checkpoint_that_lists_no_files_names_the_folder_and_another_tokenizer_is_said_to_be_one(tmp_path):
    (tmp_path / "t.txt").write_text("some line\n" * 60)
    data = TextFiles(paths=str(tmp_path / "t.txt"), cache_dir=str(tmp_path / "cache"), block_size=4, global_batch_size=2)
    data.prepare_data()
    data.setup()
    state = data.state_dict()
    assert data.changes_since({"TextFiles": state}) == []
    (said,) = data.changes_since({"TextFiles": state | {"fingerprint": "0"}})
    assert said.startswith("the files are the checkpoint's, but their tokens differ: the tokenizer or the split has changed")
    del state["files"]
    (said,) = data.changes_since({"TextFiles": state | {"fingerprint": "0"}})
    assert said == (
        f"the text in {tmp_path} is not the checkpoint's, which does not list its files "
        "(--accept_changes true continues with it)"
    )
