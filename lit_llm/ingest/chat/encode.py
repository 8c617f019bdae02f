"""From a conversation to token ids and their mask."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from lit_llm.ingest.chat.render import Renderer
from lit_llm.ingest.chat.template import ChatTemplate
from lit_llm.tokenizers import Tokenizer

# Around the name of a special token in a message. Of a private use area, so no text has them.
_BEGIN, _END = "\U000ff000", "\U000ff001"


class EncodedChat(NamedTuple):
    ids: np.ndarray
    """(n,) int64."""
    mask: np.ndarray
    """(n,) uint8: 1 for the tokens that the assistant writes."""
    bytes: int
    """Of the text."""


class ChatEncoder:
    """Encode conversations as a template writes them: its special tokens become their ids, and nothing is added.

    A token is a target if any of its characters is the assistant's. The name of a special token within a message is encoded
    as ordinary text: nobody can end a turn by writing its name.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._renderer = Renderer(template)
        self._backend, self._as_text = _backend(tokenizer), _backend(tokenizer)
        self._as_text.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder().values()
        names = [one.content for one in added if one.special or (one.content in template.text and not one.content.isspace())]
        longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._special = re.compile(longest_first or "(?!)")

    def check(self) -> None:
        """Raises:
        UserError: The template is damaged, or leaves out what the assistant says.
        """
        self._renderer.check()

    def prompt_ids(self, message: str) -> list[int]:
        """Ids of a user's message and of what comes before the answer."""
        messages = self._marked([{"role": "user", "content": message}])
        ids, _ = self._encode(self._renderer.prompt(messages, where="the prompt (--prompt)"))
        return [int(i) for i in ids]

    def end_of_turn_id(self) -> int | None:
        """The id with which an answer ends: the first after its text. None if an answer ends with its text."""
        answer = "Answer"
        text, spans = self._renderer.conversation(
            [{"role": "user", "content": "Question"}, {"role": "assistant", "content": answer}],
            where="a question and an answer",
        )
        ids, offsets = self._encode(text)
        end = text.index(answer, spans[0][0]) + len(answer)
        after = np.flatnonzero((offsets[:, 0] >= end) & (offsets[:, 0] < spans[-1][1]))
        return int(ids[after[0]]) if after.size else None

    def encode(self, conversation: bytes, *, where: str) -> EncodedChat:
        """Encode one conversation.

        Args:
            conversation: JSON, as ``lit_llm.ingest.readers.messages`` writes it.
            where: names it in messages, like "conversation 3 of FILE".

        Raises:
            UserError: The template refuses it, or what the assistant writes cannot be found.
        """
        messages = json.loads(conversation)
        text, answers = self._renderer.conversation(self._marked(messages), where=where)
        ids, offsets = self._encode(text)
        return EncodedChat(ids, assistant_mask(offsets, answers), len(text.encode()))

    def _marked(self, value: Any) -> Any:
        """The same messages, with marks around the names of special tokens in their texts."""
        if isinstance(value, str):
            if not self._special.search(value) and _BEGIN not in value and _END not in value:
                return value
            return self._special.sub(f"{_BEGIN}\\g<0>{_END}", value.replace(_BEGIN, "").replace(_END, ""))
        if isinstance(value, list):
            return [self._marked(one) for one in value]
        if isinstance(value, dict):
            return {key: one if key == "role" else self._marked(one) for key, one in value.items()}
        return value

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids (n,) of a text with marks, and the characters (n, 2) of each: the first, and the one after the last."""
        ids, offsets, begin = [], [], 0
        for piece in re.split(f"({_BEGIN}[^{_END}]*{_END}|[{_BEGIN}{_END}])", text):
            content = piece.strip(_BEGIN + _END)
            if content:
                encoder = self._backend if content == piece else self._as_text
                some, places = _encoded(encoder, content, continues=begin > 0)
                ids.append(some)
                offsets.append(places + begin + piece.index(content))
            begin += len(piece)
        return np.concatenate([np.empty(0, np.int64), *ids]), np.concatenate([np.empty((0, 2), np.int64), *offsets])


def assistant_mask(offsets: np.ndarray, answers: list[tuple[int, int]]) -> np.ndarray:
    """(n,) uint8: 1 for each token from the first to the last that has a character of an answer.

    Args:
        offsets: (n, 2) characters of each token.
        answers: the first character of each, and the one after its last.
    """
    mask = np.zeros(len(offsets), dtype=np.uint8)
    for begin, end in answers:
        inside = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
        if begin < end and inside.size:
            mask[inside[0] : inside[-1] + 1] = 1
    return mask


def _backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer of the library, which knows the names of special tokens in a text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None  # it would take the spaces out of the offsets, and adds nothing that is wanted here
    return backend


def _encoded(backend: tokenizers.Tokenizer, text: str, *, continues: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids and offsets of a text. Some tokenizers put a space before a text: not before one that ``continues`` another."""
    if continues:
        newline, joined = backend.encode("\n").ids, backend.encode(f"\n{text}")
        if joined.ids[: len(newline)] == newline:
            return _arrays(joined.ids[len(newline) :], joined.offsets[len(newline) :], shift=-1)
    encoding = backend.encode(text)
    return _arrays(encoding.ids, encoding.offsets)


def _arrays(ids: list[int], offsets: list[tuple[int, int]], *, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2) + shift
