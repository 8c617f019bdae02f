"""Which files have changed since a checkpoint."""

from pathlib import Path

import pytest

from lit_llm.data import TextFiles
from lit_llm.data.corpus import MAX_FILES, describe_files, file_changes


def written(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def test_changed_new_and_missing_files_are_named_and_moved_ones_are_not(tmp_path):
    before = describe_files(written(tmp_path / "a", one=b"1", two=b"2", three=b"3", four=b"4"))
    (tmp_path / "a" / "two").write_bytes(b"x")  # as long as before
    (tmp_path / "a" / "three").unlink()
    (tmp_path / "a" / "four").rename(tmp_path / "a" / "vier")
    now = describe_files(written(tmp_path / "a", five=b"5"))
    names = [change.replace(f"{tmp_path}/a/", "") for change in file_changes(before, now)]
    assert names == ["two has changed", "three is gone", "five is new"]
    assert file_changes(before, before) == []


@pytest.mark.parametrize("position", [0, 2**21, 2**22 - 1])
def test_a_change_at_the_start_the_middle_or_the_end_of_a_large_file_is_found(tmp_path, position):
    content = bytearray(2**22)
    before = describe_files(written(tmp_path / "a", large=content))
    content[position] = 1
    (change,) = file_changes(before, describe_files(written(tmp_path / "a", large=content)))
    assert change.endswith("large has changed")


def test_a_checkpoint_lists_no_more_files_than_a_thousand():
    assert MAX_FILES == 1000 and describe_files(Path(f"{i}") for i in range(1001)) == {}


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
