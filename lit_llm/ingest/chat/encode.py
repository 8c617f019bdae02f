"""Encode conversations as token ids, with a mask of the tokens that the assistant writes."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from lit_llm.core.errors import UserError, library_errors
from lit_llm.ingest.chat.render import SENTINEL, Chat, Message, Renderer
from lit_llm.ingest.chat.template import ChatTemplate
from lit_llm.tokenizers import Tokenizer

# Marks around the name of a special token in a message. They are characters for private use, so no text has them.
_BEGIN, _END = "\U000ff000", "\U000ff001"
_NONE = re.compile("(?!)")


class EncodedChat(NamedTuple):
    ids: np.ndarray
    """(n,) int64: the token ids of the conversation."""
    mask: np.ndarray
    """(n,) uint8: 1 for the tokens that the assistant writes."""
    bytes: int
    """The number of UTF-8 bytes of the conversation's text."""


class ChatEncoder:
    """Encodes conversations as a chat template writes them. The template's special tokens become their ids; no id is added.

    A token is a target if the assistant writes any of the token's characters. If a message has the name of a special token, the
    name is encoded as ordinary text, so that nobody can end a turn by writing the name of the end-of-turn token.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._backend, self._as_text = _backend(tokenizer), _backend(tokenizer)
        self._as_text.encode_special_tokens = True
        self._added = self._backend.get_added_tokens_decoder()
        self._special = _any_of(one.content for one in self._added.values() if one.special)
        self._renderer = Renderer(template, _any_of(one.content for one in self._added.values()))

    def check(self) -> None:
        """Check that the chat template can write a question and its answer.

        Raises:
            UserError: The template is damaged, or leaves out the assistant's text.
        """
        self._renderer.check()

    def prompt_ids(self, messages: list[Message], *, where: str) -> list[int]:
        """The token ids of a prompt: of ``messages``, which end before an answer, and of the template's text before the answer.

        Args:
            where: the name of the prompt in errors, like "the prompt (--prompt)".

        Raises:
            UserError: The template refuses the messages.
        """
        write, chat = functools.partial(self._renderer.text, where=where, prompt=True), {"messages": messages}
        text = write(chat)
        ids, _ = self._encode(text, self._names(chat, text, write, where))
        return [int(i) for i in ids]

    def end_of_turn_id(self) -> int | None:
        """The id that ends an answer: the first added token that the template writes after the answer's text or, without an
        added token, the first token after the text. None if the template writes nothing after the text."""
        text, answers = self._renderer.sentinel()
        end = text.rfind(SENTINEL) + len(SENTINEL)
        ids, offsets = self._encode(text, [])
        after = ids[(offsets[:, 0] >= end) & (offsets[:, 0] < max((last for _, last in answers), default=0))].tolist()
        return next((i for i in after if i in self._added), after[0] if after else None) if SENTINEL in text else None

    def encode(self, conversation: bytes, *, where: str) -> list[EncodedChat]:
        """Encode a conversation, and return a list with one `EncodedChat`. A preference pair gives two: the conversation with
        the chosen answer, then with the rejected answer. Only these two answers are targets.

        Args:
            conversation: JSON, as ``lit_llm.ingest.readers.messages`` writes it.
            where: the name of the conversation in errors, like "conversation 3 of FILE".

        Raises:
            UserError: The template refuses the conversation or writes both answers alike, or no text of the assistant is found.
        """
        given = json.loads(conversation)
        chat = given if isinstance(given, dict) else {"messages": given}
        if "rejected" not in chat:
            return [self._encoded(chat, where)]
        prompt = chat["messages"]
        of_prompt = sum(message["role"] == "assistant" for message in prompt)
        rest = {key: value for key, value in chat.items() if key not in ("chosen", "rejected")}
        pair = [
            self._encoded(rest | {"messages": prompt + chat[name]}, f"{name} of {where}", skip=of_prompt)
            for name in ("chosen", "rejected")
        ]
        if np.array_equal(pair[0].ids, pair[1].ids):
            raise UserError(f"{where} is a pair without a difference: the template writes both answers alike. Remove it.")
        for name, one in zip(("chosen", "rejected"), pair, strict=True):
            if not one.mask[1:].any():
                raise UserError(f"{where} has an empty answer under {name!r}, of which no token is learned: remove it.")
        return pair

    def _encoded(self, chat: Chat, where: str, *, skip: int = 0) -> EncodedChat:
        """Encode a conversation. The first ``skip`` answers of the assistant are not targets."""
        chat = self._renderer.readable(chat)
        text, answers = self._renderer.conversation(chat, where=where)
        if skip:  # a template may mark only some answers, so answers are counted from the end
            learned = sum(message["role"] == "assistant" for message in chat["messages"]) - skip
            answers = answers[-learned:]
        names = self._names(chat, text, functools.partial(self._renderer.text, where=where), where)
        ids, offsets = self._encode(text, names)
        return EncodedChat(ids, assistant_mask(offsets, answers), len(text.encode()))

    def _names(self, chat: Chat, text: str, write: Callable[[Chat], str], where: str) -> list[tuple[int, int]]:
        """The places (first character, end) in ``text`` where a message has the name of a special token.

        To find these places, the template writes the messages once more, with marks around the names. A template may search an
        answer for a name, such as ``</think>``, to separate the thought from the answer. If marks would disturb the search, the
        name gets no marks in answers, and in answers it is encoded as a special token.
        """
        marked = _marked(chat, self._special, self._special)
        if marked == chat:
            return []
        places = _places(marked, text, write)
        if places is None:
            names = set(re.findall(f"{_BEGIN}(.*?){_END}", json.dumps(marked, ensure_ascii=False)))
            kept = [name for name in names if _places(_marked(chat, _any_of([name]), _NONE), text, write) is not None]
            kept = [name for name in kept if _partner(name) in kept or _partner(name) not in names]  # both or none
            places = _places(_marked(chat, _any_of(kept), self._special), text, write)
        if places is None:
            raise UserError(
                f"{where} has the name of a special token in a message, and the chat template {self._renderer.template.name} "
                "looks into that message: what it writes of the name cannot be told from its own tokens. Remove the name."
            )
        return places

    def _encode(self, text: str, names: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """The token ids (n,) of a text, and the places of the tokens in the text (n, 2): first character and end.

        ``names``: places (first character, end) where the name of a special token is encoded as ordinary text.
        """
        ids, offsets, begin = [np.empty(0, np.int64)], [np.empty((0, 2), np.int64)], 0
        for first, end in [*names, (len(text), len(text))]:
            for encoder, stop in ((self._backend, first), (self._as_text, end)):
                if begin < stop:
                    some, places = _encoded(encoder, text[begin:stop], continues=begin > 0)
                    ids.append(some)
                    offsets.append(places + begin)
                begin = stop
        return np.concatenate(ids), np.concatenate(offsets)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(longest_first) if longest_first else _NONE


def _marked(chat: Chat, in_answers: re.Pattern[str], elsewhere: re.Pattern[str]) -> Chat:
    """A copy of the conversation with marks around names of special tokens: around the names that ``in_answers`` matches in the
    assistant's messages, and the names that ``elsewhere`` matches in all other texts."""
    messages = [
        _mark(one, in_answers if one["role"] == "assistant" else elsewhere) | {"role": one["role"]} for one in chat["messages"]
    ]
    return {key: _mark(value, elsewhere) for key, value in chat.items() if key != "messages"} | {"messages": messages}


def _mark(value: Any, names: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return names.sub(f"{_BEGIN}\\g<0>{_END}", value)
    if isinstance(value, list):
        return [_mark(one, names) for one in value]
    if isinstance(value, dict):
        return {_mark(key, names): _mark(one, names) for key, one in value.items()}
    return value


def _partner(name: str) -> str:
    """The closing name for an opening name, `</think>` for `<think>`, or the opening name for a closing name."""
    return name.replace("</", "<", 1) if "</" in name else name.replace("<", "</", 1)


def _places(marked: Chat, text: str, write: Callable[[Chat], str]) -> list[tuple[int, int]] | None:
    """The places (first character, end) in ``text`` of the names that have marks in ``marked``, a copy of the conversation of
    ``text``. None if the template (``write``) refuses ``marked``, or writes it, but for the marks, as another text."""
    try:
        pieces = re.split(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}", write(marked))
    except UserError:
        return None
    ends = list(itertools.accumulate(len(piece) for piece in pieces))
    return list(zip(ends[::2], ends[1::2], strict=False)) if "".join(pieces) == text else None


def assistant_mask(offsets: np.ndarray, answers: list[tuple[int, int]]) -> np.ndarray:
    """(n,) uint8: 1 for the tokens of each answer, from the first to the last token with a character of the answer.

    Args:
        offsets: (n, 2) the first character of each token, and the character after its last character.
        answers: the first character of each answer, and the character after its last character.
    """
    mask = np.zeros(len(offsets), dtype=np.uint8)
    for begin, end in answers:
        inside = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
        if begin < end and inside.size:
            mask[inside[0] : inside[-1] + 1] = 1
    return mask


def _backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A copy of ``tokenizer`` as an object of the package tokenizers, which encodes names of special tokens as their ids."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None  # a post-processor would take spaces out of offsets, and add ids such as BOS
    return backend


def _encoded(backend: tokenizers.Tokenizer, text: str, *, continues: bool) -> tuple[np.ndarray, np.ndarray]:
    """The ids (n,) of a text, and the places of the tokens in the text (n, 2): first character and end. ``continues``: the text
    follows other text, so a tokenizer that puts a space before every text must put no space before this text."""
    with library_errors("The tokenizer cannot encode a text"):
        if continues:
            newline, joined = backend.encode("\n").ids, backend.encode(f"\n{text}")
            if joined.ids[: len(newline)] == newline:
                return _arrays(joined.ids[len(newline) :], joined.offsets[len(newline) :], shift=-1)
        encoding = backend.encode(text)
    return _arrays(encoding.ids, encoding.offsets)


def _arrays(ids: list[int], offsets: list[tuple[int, int]], *, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2) + shift
