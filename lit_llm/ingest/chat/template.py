"""A chat template, which is read from a file that the user names or from the files of a Hugging Face tokenizer."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lit_llm.core.disk import read_object, read_text, write_text
from lit_llm.core.errors import UserError
from lit_llm.tokenizers import Tokenizer
from lit_llm.tokenizers.hugging_face import TOKENIZER_CONFIG, configured_tokens, optional_object

CHAT_TEMPLATE_FILE = "chat_template.jinja"
AUTO = "auto"

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

_GENERATION = "generation_config.json"


class NoChatTemplate(UserError):
    """The error for a tokenizer whose files have no chat template."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template for conversations, and the special tokens that the template can use by name. Can be pickled."""

    name: str
    """The path of the template's file, for messages."""
    text: str
    special_tokens: dict[str, str]
    """Name → text of a special token, such as "eos_token" → "</s>"."""

    @classmethod
    def find(
        cls,
        setting: str,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        mend: str = "name a file with one (--data.chat_template FILE.jinja)",
    ) -> ChatTemplate:
        """The chat template that a setting names.

        Args:
            setting: "auto" for the template in the tokenizer's files, else the path of a file with a template.
            folder: where the tokenizer's files are.
            mend: the advice in the error about a tokenizer without a template.

        Raises:
            NoChatTemplate: The setting is "auto", and the tokenizer's files have no template.
            UserError: A file cannot be read.
        """
        tokens = _special_tokens(folder, tokenizer)
        if setting != AUTO:
            file = Path(os.path.expanduser(setting))
            return cls(setting, read_text(file, mend=" (--data.chat_template)"), tokens)
        if os.path.lexists(folder / CHAT_TEMPLATE_FILE):
            file = folder / CHAT_TEMPLATE_FILE
            return cls(str(file), read_text(file), tokens)
        for file in (folder / "chat_template.json", folder / TOKENIZER_CONFIG):
            template = optional_object(file).get("chat_template")
            if isinstance(template, list):  # several, by name
                by_name = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
                template, with_tools = by_name.get("default"), by_name.get("tool_use")
                if isinstance(template, str) and isinstance(with_tools, str):  # transformers takes this one if there are tools
                    bodies = [one.removesuffix("\n") for one in (with_tools, template)]
                    template = f"{{% if tools +%}}{bodies[0]}{{%+ else +%}}{bodies[1]}{{%+ endif %}}"
            if isinstance(template, str):
                return cls(str(file), template, tokens)
        raise NoChatTemplate(f"The tokenizer in {folder} has no chat template: {mend}.")

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks the assistant's text with {% generation %}."""
        return _MARK.search(self.text) is not None

    def identity(self) -> str:
        """A text for a cache key. It differs for templates that differ and, if the template can write the date, every day."""
        day = str(datetime.date.today()) if "strftime_now" in self.text else ""
        content = json.dumps([self.text, self.special_tokens, day], sort_keys=True)
        return f"chat-{hashlib.sha256(content.encode()).hexdigest()}"


def _special_tokens(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Name, such as "eos_token" → text of the special token, from the tokenizer's files and from its BOS and EOS ids."""
    tokens = {}
    for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if token is not None:
            tokens[name] = tokenizer.decode([token])
    for name in _TOKEN_NAMES:
        if candidates := configured_tokens(folder, name):
            tokens[name] = candidates[0]
    return tokens


class ChatForm(NamedTuple):
    """Record of the form in which the conversations of shards are written: the chat template and the end-of-turn id."""

    template: str
    """The Jinja source of the chat template."""
    end_of_turn_id: int | None
    """The id that ends an answer; None if the template writes no token after an answer."""

    def write(self, folder: Path) -> None:
        """Write ``chat_template.jinja`` and ``generation_config.json``, as Hugging Face folders have them."""
        write_text(folder / CHAT_TEMPLATE_FILE, self.template)
        write_text(folder / _GENERATION, json.dumps({"eos_token_id": self.end_of_turn_id}) + "\n")

    @classmethod
    def read(cls, folder: Path) -> ChatForm | None:
        """Read the form of the conversations of the shards in ``folder``; None if the shards have no conversations.

        Raises:
            UserError: ``chat_template.jinja`` or ``generation_config.json`` is damaged, or the latter is missing.
        """
        if not os.path.lexists(folder / CHAT_TEMPLATE_FILE):
            return None
        mend = ": restore it, or prepare the data again."
        stop = read_object(folder / _GENERATION, mend=mend).get("eos_token_id", -1)
        if not (stop is None or (type(stop) is int and stop >= 0)):
            raise UserError(f"{folder / _GENERATION} does not say how an answer ends, as prepare wrote it{mend}")
        return cls(read_text(folder / CHAT_TEMPLATE_FILE, mend=mend), stop)
