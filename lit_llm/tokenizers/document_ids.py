"""The ids around a document, where tokenizer.json does not tell them: a small file beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from lit_llm.core.disk import read_object
from lit_llm.core.errors import UserError

DOCUMENT_IDS_FILE = "document_ids.json"


class DocumentIds(NamedTuple):
    """The ids that precede and follow every document; None for none."""

    bos_id: int | None
    eos_id: int | None

    def to_json(self) -> str:
        return json.dumps(self._asdict()) + "\n"

    @classmethod
    def read(cls, folder: Path, vocab_size: int) -> DocumentIds | None:
        """The ids saved in ``folder``; None without the file.

        Raises:
            UserError: if the file is damaged.
        """
        file = folder / DOCUMENT_IDS_FILE
        if not os.path.lexists(file):
            return None
        mend = " (damaged): restore it, or delete it and name the tokens (--data.tokenizer.init_args.eos_token)."
        ids = read_object(file, mend=mend)
        found = cls(ids.pop("bos_id", -1), ids.pop("eos_id", -1))
        if ids or any(i is not None and not (type(i) is int and 0 <= i < vocab_size) for i in found):
            what = f"must be an object with bos_id and eos_id, each null or an id below {vocab_size}"
            raise UserError(f"{file} {what}{mend}")
        return found
