"""Train on conversations: the assistant's tokens are learned, the others are only read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from lit_llm.core.errors import UserError
from lit_llm.data.text import GivenFiles
from lit_llm.ingest.chat import ChatEncoder, ChatTemplate
from lit_llm.ingest.readers import ReadSettings
from lit_llm.tokenizers import TokenizerJSON


class ChatFiles(GivenFiles):
    """Conversations in JSONL, Parquet, Arrow and datasets of the hub, written by a chat template.

    A line or row is a conversation: a list of messages with "role" and "content", or with ShareGPT's "from" and "value". It
    becomes one document, with the tokens of the template and no others. Targets are the tokens that the assistant writes,
    with the end of its turn (``lit_llm.ingest.chat``). Without ``val``, conversations are held out by a hash of their content.

    Args:
        messages_key: the key or column of the messages. Dots descend: ``data.messages``.
        chat_template: a file with a Jinja template. auto: the tokenizer's own, from the files beside its tokenizer.json.
        kwargs: the arguments of ``GivenFiles``.
    """

    def __init__(self, *, messages_key: str = "messages", chat_template: str = "auto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.messages_key, self._template_setting = messages_key, chat_template

    @property
    def read_settings(self) -> ReadSettings:
        return ReadSettings(text_key=self.messages_key, messages=True)

    @cached_property
    def chat_template(self) -> ChatTemplate:  # type: ignore[override]  # the base has none
        tokenizer = self.source_tokenizer
        assert isinstance(tokenizer, TokenizerJSON), "`source_problems` reports another"
        return ChatTemplate.find(self._template_setting, tokenizer.folder, tokenizer)

    def source_problems(self) -> list[str]:
        return [*super().source_problems(), *self._template_problems()]

    def _template_problems(self) -> list[str]:
        if not isinstance(self.source_tokenizer, TokenizerJSON):
            return [
                "Conversations need a tokenizer.json with the special tokens of a chat template, not "
                f"{type(self.source_tokenizer).__name__} (--data.tokenizer TokenizerJSON --data.tokenizer.path FOLDER)."
            ]
        try:
            ChatEncoder(self.source_tokenizer, self.chat_template).check()
        except UserError as error:
            return [str(error)]
        return []
