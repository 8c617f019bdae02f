"""The form of conversations, beside the shards that are written in it: what a run needs to answer in the same form."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from lit_llm.core.disk import read_object, read_text, write_text
from lit_llm.core.errors import UserError
from lit_llm.ingest.chat.template import CHAT_TEMPLATE_FILE, MOST_BYTES

_GENERATION = "generation_config.json"


class ChatForm(NamedTuple):
    """How conversations were written."""

    template: str
    """Jinja."""
    end_of_turn_id: int | None
    """The id with which an answer ends; None if an answer ends with its text."""

    def write(self, folder: Path) -> None:
        """Write ``chat_template.jinja`` and ``generation_config.json``, as Hugging Face folders have them."""
        write_text(folder / CHAT_TEMPLATE_FILE, self.template)
        write_text(folder / _GENERATION, json.dumps({"eos_token_id": self.end_of_turn_id}) + "\n")

    @classmethod
    def read(cls, folder: Path) -> ChatForm | None:
        """The form of the shards in ``folder``; None if they are no conversations.

        Raises:
            UserError: A file of it is missing or damaged.
        """
        if not os.path.lexists(folder / CHAT_TEMPLATE_FILE):
            return None
        mend = ": restore it, or prepare the data again."
        stop = read_object(folder / _GENERATION, mend=mend).get("eos_token_id", -1)
        if not (stop is None or (type(stop) is int and stop >= 0)):
            raise UserError(f"{folder / _GENERATION} does not say how an answer ends, as prepare wrote it{mend}")
        return cls(read_text(folder / CHAT_TEMPLATE_FILE, MOST_BYTES, mend=mend), stop)
