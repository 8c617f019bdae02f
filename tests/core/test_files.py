"""Files that are read whole."""

import pytest

from lit_llm.core import disk
from lit_llm.core.errors import UserError


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read: No such file"), (b"{", "not valid JSON"), (b"[" * 100_000, "deep"), (b"[]", "not a JSON object")],
)
def test_a_file_that_is_no_json_object_is_one_sentence_with_what_mends_it(tmp_path, content, said):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{file} .*{said}.* \(--flag\)$"):
        disk.read_object(file, mend=" (--flag)")
