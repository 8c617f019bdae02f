"""From messages to text, and to the parts of it that the assistant writes."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.chat.limited_process import LimitedProcess, Refused
from lit_llm.ingest.chat.template import ChatTemplate

Message = dict[str, Any]
Chat = dict[str, Any]
"""A conversation: "messages", and perhaps "tools", "documents" and "chat_template_kwargs" for the template."""

SENTINEL = "\U000ff002"
"""Stands for an answer where only its place is asked. Of a private use area: no filter changes it, and no text has it."""
_MARK_THEM = "mark the answers in it with {% generation %} and {% endgeneration %} (--data.chat_template FILE.jinja)"
_MOST_ANSWERS = 2000
"""Without marks, a conversation is written twice or more for each answer. Agents' longest have hundreds."""
_PROMPTS: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""A template may open a thought in its prompt, and have another prompt without, under this name in all that have it."""


class Rendered(NamedTuple):
    """A conversation as a template writes it."""

    text: str
    answers: list[tuple[int, int]]
    """Where the characters begin and end that the assistant writes, in order."""


class Renderer:
    """Write conversations with a template, in Jinja's environment of transformers.

    A template with {% generation %} says itself what the assistant writes. Of another, it is the text between the prompt for
    an answer and the next message. The conversation is written up to the answer with the prompt, and up to and with the answer:
    mostly, both are beginnings of the whole. Where they are not, because the template writes an earlier answer in another way
    than the last, the end of the answer is where the text begins to stay the same if the answer is replaced.

    Args:
        tokens: the names of tokens that are never divided.

    Raises:
        UserError: transformers is not installed.
    """

    def __init__(self, template: ChatTemplate, tokens: re.Pattern[str]) -> None:
        self.template, self._tokens = template, tokens
        render = need("transformers.utils.chat_template_utils", what="A chat template").render_jinja_template
        need("jinja2", what="A chat template")
        self._render = LimitedProcess(lambda ours, theirs: render(chat_template=template.text, **ours, **theirs))

    def check(self) -> None:
        """Raises:
        UserError: The template is damaged, or leaves out what the assistant says.
        """
        text, answers = self.sentinel()
        if not any(SENTINEL in text[begin:end] for begin, end in answers):
            raise self._unwritten("a question and an answer")

    def sentinel(self) -> Rendered:
        """A question, and ``SENTINEL`` as its answer. Without marks in the template, the whole text counts as the answer."""
        return self._exchange("Question", SENTINEL)

    def question(self) -> tuple[bool, bool]:
        """Whether a user's question is in the text, and whether the template marks it as written by the assistant."""
        text, answers = self._exchange(SENTINEL, "Answer")
        marked = self.template.marks_answers and any(SENTINEL in text[begin:end] for begin, end in answers)
        return SENTINEL in text, marked

    def _exchange(self, question: str, answer: str) -> Rendered:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return self._marked({"messages": messages}, "a question and an answer")

    def text(self, chat: Chat, *, where: str, prompt: bool = False) -> str:
        """A conversation, with what comes before an answer if it is a ``prompt``."""
        return str(self._call(chat, where, prompt=prompt)[0][0])

    def readable(self, chat: Chat) -> Chat:
        """The same conversation. Arguments of a call that are JSON text are objects, if the template would quote the text."""
        if not any(one.get("tool_calls") for one in chat["messages"]) or self._takes_json_text:
            return chat
        return chat | {"messages": _with_arguments(chat["messages"], _as_object)}

    def conversation(self, chat: Chat, *, where: str) -> Rendered:
        """A whole conversation.

        Args:
            where: names it in messages, like "conversation 3 of FILE".

        Raises:
            UserError: The template refuses the messages, or what the assistant writes cannot be found.
        """
        messages, marks = chat["messages"], self.template.marks_answers
        numbers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
        if not marks and len(numbers) > _MOST_ANSWERS:
            raise UserError(f"{where} has {len(numbers):,} answers, but at most {_MOST_ANSWERS:,} can be found: {_MARK_THEM}.")
        text, answers = self._marked(chat, where)
        if not marks:
            answers = [self._answer(chat, i, text, where, last=i == numbers[-1]) for i in numbers]
        learned = [text[begin:end] for begin, end in answers]
        if marks:
            learned = ["\n".join(learned)] * len(numbers)
        missing = [i for i, one in zip(numbers, learned, strict=True) if not self._is_in(chat, i, one, where)]
        if missing if not marks else len(missing) == len(numbers):  # marks may leave out some
            raise self._unwritten(f"message {missing[0] + 1} of {where}")
        return Rendered(text, answers)

    def _answer(self, chat: Chat, number: int, text: str, where: str, *, last: bool) -> tuple[int, int]:
        """Where the message ``number`` is in the text of all messages. Of the answers, it may be the ``last``."""
        until = chat | {"messages": chat["messages"][: number + 1]}
        alone = text if len(until["messages"]) == len(chat["messages"]) else self.text(until, where=where)
        before = {"messages": chat["messages"][:number]}
        kwargs = chat.get("chat_template_kwargs", {})
        prompts = (
            self.text(chat | before | {"chat_template_kwargs": kwargs | one}, where=where, prompt=True) for one in _PROMPTS
        )
        prompt = first = next(prompts)
        if not text.startswith(first):
            prompt = next((one for one in prompts if text.startswith(one)), first)
        least, begin = 0, len(prompt)
        if text.startswith(prompt) and text.startswith(alone) and begin <= len(alone):
            return begin, len(alone)
        if not text.startswith(prompt):
            if last:
                only = prompt[self._shared(prompt, text) :]
                raise self._refusal(
                    f"ends the prompt for an answer with {only!r}, but does not write it before message {number + 1} of "
                    f"{where}, so the answer would not follow its prompt: {_MARK_THEM}."
                )
            least = self._shared(prompt, self.text(chat | before, where=where))
            begin = self._shared(prompt, self.text(_with(chat, number, {"content": SENTINEL}), where=where))
        message = chat["messages"][number]
        changes = _with_arguments(message, _other_arguments)
        changes |= {"content": SENTINEL} if message.get("content") or not message.get("tool_calls") else {}
        rest = _shared(text[::-1], self.text(_with(chat, number, changes), where=where)[::-1])
        tail = _shared(alone[::-1], self.text(_with(until, number, changes), where=where)[::-1])
        if rest == len(text):
            raise self._unwritten(f"message {number + 1} of {where}")
        end = len(text) - rest
        end += self._shared(text[end:], alone[len(alone) - tail :])  # what ends an earlier answer only is not learned
        if not least <= begin <= end:
            raise self._refusal(
                f"writes message {number + 1} of {where} in another way when more messages follow, so the answers cannot be "
                f"found: {_MARK_THEM}."
            )
        return begin, end

    def _shared(self, one: str, other: str) -> int:
        """With how many characters both begin, in whole tokens."""
        shared = _shared(one, other)
        near = [self._tokens.finditer(text, max(0, shared - 99), shared + 99) for text in (one, other)]
        return min([shared, *(token.start() for tokens in near for token in tokens if token.start() < shared < token.end())])

    def _is_in(self, chat: Chat, number: int, learned: str, where: str) -> bool:
        """Whether what the message ``number`` says is in the ``learned`` text, perhaps changed."""
        message = chat["messages"][number]
        if calls := message.get("tool_calls"):  # then a template may leave out the content, as a thought
            return all(str(call.get("function", call).get("name")) in learned for call in calls)
        if (message.get("content") or "").strip() in learned:
            return True
        text, answers = self._marked(_with(chat, number, {"content": SENTINEL}), where)
        return any(SENTINEL in text[begin:end] for begin, end in answers)

    @functools.cached_property
    def _takes_json_text(self) -> bool:
        """Whether the template writes arguments that are JSON text as it writes their object, or takes no object."""
        texts: list[str | None] = []
        for arguments in ('{"a": "b"}', {"a": "b"}):
            call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
            messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                texts.append(self.text({"messages": messages}, where="a call"))
            except UserError:
                texts.append(None)
        return texts[0] is not None and texts[1] in (None, texts[0])

    def _refusal(self, what: str) -> UserError:
        return UserError(f"The chat template {self.template.name} {what}")

    def _unwritten(self, where: str) -> UserError:
        return self._refusal(
            f"writes nothing of what the assistant says in {where}, so it would not be learned: give another "
            "(--data.chat_template FILE.jinja)."
        )

    def _marked(self, chat: Chat, where: str) -> Rendered:
        """The text, and what the template marks of it: all of it if it has no marks."""
        texts, answers = self._call(chat, where, marks=self.template.marks_answers)
        return Rendered(texts[0], answers[0] if answers else [(0, len(texts[0]))])

    def _call(self, chat: Chat, where: str, *, prompt: bool = False, marks: bool = False) -> Any:
        try:
            texts, answers = self._render(
                ours={
                    "conversations": [chat["messages"]],
                    "tools": chat.get("tools"),
                    "documents": chat.get("documents"),
                    "add_generation_prompt": prompt,
                    "return_assistant_tokens_mask": marks,
                    "continue_final_message": False,
                },
                theirs=self.template.special_tokens | chat.get("chat_template_kwargs", {}),
            )
            texts[0].encode()  # a half of a character (a lone surrogate) is no text
        except Refused as error:
            line = "" if error.line is None else f" in line {error.line} of it"
            raise self._refusal(f"cannot write {where}: {error}{line}.") from error
        except UnicodeEncodeError as error:
            raise self._refusal(f"cannot write {where}: {error}.") from error
        return texts, answers


def _with_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same messages, with other arguments in their calls."""
    if isinstance(value, list):
        return [_with_arguments(one, change) for one in value]
    if isinstance(value, dict):
        return {key: change(one) if key == "arguments" else _with_arguments(one, change) for key, one in value.items()}
    return value


def _other_arguments(arguments: Any) -> Any:
    return dict.fromkeys(arguments or [SENTINEL], SENTINEL) if isinstance(arguments, dict) else SENTINEL


def _as_object(arguments: Any) -> Any:
    """The object that a JSON text stands for; other arguments as they are."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        value = json.loads(arguments)
        return value if isinstance(value, dict) else arguments
    return arguments


def _with(chat: Chat, number: int, changes: Message) -> Chat:
    messages = chat["messages"]
    return chat | {"messages": [*messages[:number], messages[number] | changes, *messages[number + 1 :]]}


def _shared(one: str, other: str) -> int:
    """With how many characters both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
