"""Write conversations as text by a chat template, and find the parts of the text that the assistant writes: the answers."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.chat.template import ChatTemplate

Message = dict[str, Any]
Chat = dict[str, Any]
"""A conversation: a dict with "messages", and perhaps "tools", "documents" and "chat_template_kwargs" for the template."""

SENTINEL = "\U000ff002"
"""A text that replaces an answer, to find where a template writes the answer. No other text has this private-use character."""
_MARK_THEM = "mark the answers in it with {% generation %} and {% endgeneration %} (--data.chat_template FILE.jinja)"
_PROMPTS: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""Template arguments that are tried in turn to write a prompt. Templates that can open a thought use enable_thinking."""


class Rendered(NamedTuple):
    """Record of a conversation as a template writes it: the text, and the places of the assistant's answers in it."""

    text: str
    answers: list[tuple[int, int]]
    """The first character in ``text`` of each answer of the assistant, in order, and the character after the answer."""


class Renderer:
    """Writes conversations with a chat template, as transformers does with Jinja.

    A template with {% generation %} marks the text that the assistant writes. Without marks, an answer is the text between its
    prompt and the next message. To find the answer, the conversation is written twice more: up to the end of the prompt, and up
    to the end of the answer. Mostly, the text of the whole conversation begins with both texts. If not, because the template
    writes earlier answers in another way than the last answer, the conversation is written with another text in place of the
    answer. The answer ends where the two texts of the conversation are equal again.

    Args:
        tokens: a pattern that matches the names of added tokens. An answer never begins or ends within such a name.

    Raises:
        UserError: transformers is not installed.
    """

    def __init__(self, template: ChatTemplate, tokens: re.Pattern[str]) -> None:
        self.template, self._tokens = template, tokens
        need("jinja2", what="A chat template")
        self._render = need("transformers.utils.chat_template_utils", what="A chat template").render_jinja_template

    def check(self) -> None:
        """Check that the chat template can write a question and its answer.

        Raises:
            UserError: The template is damaged, or leaves out the assistant's text.
        """
        text, answers = self.sentinel()
        if not any(SENTINEL in text[begin:end] for begin, end in answers):
            raise self._unwritten("a question and an answer")

    def sentinel(self) -> Rendered:
        """Write a conversation of a question and the answer ``SENTINEL``. Without marks, the whole text is the answer."""
        return self._exchange("Question", SENTINEL)

    def question(self) -> tuple[bool, bool]:
        """(whether the template writes a user's question, whether it marks the question as text of the assistant)."""
        text, answers = self._exchange(SENTINEL, "Answer")
        marked = self.template.marks_answers and any(SENTINEL in text[begin:end] for begin, end in answers)
        return SENTINEL in text, marked

    def _exchange(self, question: str, answer: str) -> Rendered:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return self._marked({"messages": messages}, "a question and an answer")

    def text(self, chat: Chat, *, where: str, prompt: bool = False) -> str:
        """The text of a conversation. ``where``: the conversation's name in errors. ``prompt``: whether to append the text that
        the template writes before an answer (the generation prompt)."""
        return str(self._call(chat, where, prompt=prompt)[0][0])

    def readable(self, chat: Chat) -> Chat:
        """The conversation, in which arguments of tool calls that are JSON text are parsed if the template needs objects."""
        if not any(one.get("tool_calls") for one in chat["messages"]) or self._takes_json_text:
            return chat
        return chat | {"messages": _with_arguments(chat["messages"], _as_object)}

    def conversation(self, chat: Chat, *, where: str) -> Rendered:
        """The text of a whole conversation, and the places of the assistant's answers in it.

        Args:
            where: the name of the conversation in errors, like "conversation 3 of FILE".

        Raises:
            UserError: The template refuses the messages, or an answer cannot be found in the text.
        """
        messages, marks = chat["messages"], self.template.marks_answers
        numbers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
        text, answers = self._marked(chat, where)
        if not marks:
            answers = [self._answer(chat, i, text, where, last=i == numbers[-1]) for i in numbers]
        learned = [text[begin:end] for begin, end in answers]
        if marks:
            learned = ["\n".join(learned)] * len(numbers)
        missing = [i for i, one in zip(numbers, learned, strict=True) if not self._is_in(chat, i, one, where)]
        if missing if not marks else len(missing) == len(numbers):  # a template may mark only some answers
            raise self._unwritten(f"message {missing[0] + 1} of {where}")
        return Rendered(text, answers)

    def _answer(self, chat: Chat, number: int, text: str, where: str, *, last: bool) -> tuple[int, int]:
        """The place (first character, end) in ``text``, the text of all messages, of the answer that is message ``number``.

        ``last``: whether no other answer follows. ``where``: the name of the conversation in errors.
        """
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
        end += self._shared(text[end:], alone[len(alone) - tail :])  # text that ends only earlier answers is not learned
        if not least <= begin <= end:
            raise self._refusal(
                f"writes message {number + 1} of {where} in another way when more messages follow, so the answers cannot be "
                f"found: {_MARK_THEM}."
            )
        return begin, end

    def _shared(self, one: str, other: str) -> int:
        """The length in characters of the longest common start of both texts. If that start ended inside the name of a token,
        it is cut before the name."""
        shared = _shared(one, other)
        near = [self._tokens.finditer(text, max(0, shared - 99), shared + 99) for text in (one, other)]
        return min([shared, *(token.start() for tokens in near for token in tokens if token.start() < shared < token.end())])

    def _is_in(self, chat: Chat, number: int, learned: str, where: str) -> bool:
        """Whether ``learned``, the text found as the answer of message ``number``, comes from the message: from the names of
        its tool calls or, without calls, its content, which the template may change. ``where``: the name in errors."""
        message = chat["messages"][number]
        if calls := message.get("tool_calls"):  # then a template may leave out the content, as a thought
            return all(str(call.get("function", call).get("name")) in learned for call in calls)
        if (message.get("content") or "").strip() in learned:
            return True
        text, answers = self._marked(_with(chat, number, {"content": SENTINEL}), where)
        return any(SENTINEL in text[begin:end] for begin, end in answers)

    @functools.cached_property
    def _takes_json_text(self) -> bool:
        """Whether tool arguments can stay JSON text: the template writes JSON text as it writes objects, or refuses objects."""
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
        """The text of a conversation, and the answers that the template marks. Without marks, the whole text is one answer."""
        texts, answers = self._call(chat, where, marks=self.template.marks_answers)
        return Rendered(texts[0], answers[0] if answers else [(0, len(texts[0]))])

    def _call(self, chat: Chat, where: str, *, prompt: bool = False, marks: bool = False) -> Any:
        try:
            texts, answers = self._render(
                conversations=[chat["messages"]],
                tools=chat.get("tools"),
                documents=chat.get("documents"),
                chat_template=self.template.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                continue_final_message=False,
                **self.template.special_tokens | chat.get("chat_template_kwargs", {}),
            )
            texts[0].encode()  # fails for half a character (a lone surrogate)
        except Exception as error:  # a template is a program, which can raise anything
            line = f" in line {error.lineno} of it" if hasattr(error, "lineno") else ""
            raise self._refusal(f"cannot write {where}: {str(error) or type(error).__name__}{line}.") from error
        return texts, answers


def _with_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of ``value``, messages, in which ``change`` was applied to the arguments of each tool call."""
    if isinstance(value, list):
        return [_with_arguments(one, change) for one in value]
    if isinstance(value, dict):
        return {key: change(one) if key == "arguments" else _with_arguments(one, change) for key, one in value.items()}
    return value


def _other_arguments(arguments: Any) -> Any:
    return dict.fromkeys(arguments or [SENTINEL], SENTINEL) if isinstance(arguments, dict) else SENTINEL


def _as_object(arguments: Any) -> Any:
    """The object if ``arguments`` is the JSON text of an object; else ``arguments``, unchanged."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        value = json.loads(arguments)
        return value if isinstance(value, dict) else arguments
    return arguments


def _with(chat: Chat, number: int, changes: Message) -> Chat:
    messages = chat["messages"]
    return chat | {"messages": [*messages[:number], messages[number] | changes, *messages[number + 1 :]]}


def _shared(one: str, other: str) -> int:
    """The length in characters of the longest common start of both texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
