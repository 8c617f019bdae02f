"""From messages to text, and to the parts of it that the assistant writes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from lit_llm.errors import UserError
from lit_llm.ingest.chat.template import ChatTemplate
from lit_llm.ingest.optional_package import need

Message = dict[str, Any]
Chat = dict[str, Any]
"""A conversation: "messages", and perhaps "tools", "documents" and "chat_template_kwargs" for the template."""

SENTINEL = "\U000ff002"
"""Stands for an answer where only its place is asked. Of a private use area: no filter changes it, and no text has it."""
_MARK_THEM = "mark the answers in it with {% generation %} and {% endgeneration %} (--data.chat_template FILE.jinja)"


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
        self._render = need("transformers.utils.chat_template_utils", extra="hf", what="A chat template").render_jinja_template
        self._syntax_error = need("jinja2", extra="hf", what="A chat template").TemplateSyntaxError

    def check(self) -> None:
        """Raises:
        UserError: The template is damaged, or leaves out what the assistant says.
        """
        text, answers = self.sentinel()
        if not any(SENTINEL in text[begin:end] for begin, end in answers):
            raise self._unwritten("a question and an answer")

    def sentinel(self) -> Rendered:
        """A question, and ``SENTINEL`` as its answer. Without marks in the template, the whole text counts as the answer."""
        messages = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": SENTINEL}]
        return self._marked({"messages": messages}, "a question and an answer")

    def text(self, chat: Chat, *, where: str, prompt: bool = False) -> str:
        """A conversation, with what comes before an answer if it is a ``prompt``."""
        return self._call(chat, where, add_generation_prompt=prompt)[0][0]

    def readable(self, chat: Chat) -> Chat:
        """The same conversation, with the arguments of its calls in the form that the template reads.

        A JSON text becomes the object that it stands for if the template would quote it as a string of JSON.
        """
        calls = [call for one in chat["messages"] for call in _calls(one)]
        if not any(isinstance(_function(call).get("arguments"), str) for call in calls) or self._takes_json_text:
            return chat
        return chat | {"messages": [_with_arguments(one, _as_object) for one in chat["messages"]]}

    def conversation(self, chat: Chat, *, where: str) -> Rendered:
        """A whole conversation.

        Args:
            where: names it in messages, like "conversation 3 of FILE".

        Raises:
            UserError: The template refuses the messages, or what the assistant writes cannot be found.
        """
        numbers = [i for i, one in enumerate(chat["messages"]) if one["role"] == "assistant"]
        if self.template.marks_answers:
            text, answers = self._marked(chat, where)
            learned = "\n".join(text[begin:end] for begin, end in answers)
            said = [i for i in numbers if chat["messages"][i].get("content") or _calls(chat["messages"][i])]
            if said and not any(self._is_in(chat, i, learned, where) for i in said):  # marks may leave out some
                raise self._unwritten(where)
        else:
            text = self.text(chat, where=where)
            answers = [self._answer(chat, i, text, where, last=i == numbers[-1]) for i in numbers]
            for i, (begin, end) in zip(numbers, answers, strict=True):
                if not self._is_in(chat, i, text[begin:end], where, begin):
                    raise self._unwritten(f"message {i + 1} of {where}")
        return Rendered(text, answers)

    def _answer(self, chat: Chat, number: int, text: str, where: str, *, last: bool) -> tuple[int, int]:
        """Where the message ``number`` is in the text of all messages. Of the answers, it may be the ``last``."""
        messages = chat["messages"]
        prompt = self._prompt(chat, number, where)
        alone = text if number == len(messages) - 1 else self.text(chat | {"messages": messages[: number + 1]}, where=where)
        if text.startswith(prompt) and text.startswith(alone) and len(prompt) <= len(alone):
            return len(prompt), len(alone)
        for thinks in (False, True):  # a template may open a thought in its prompt, and have another prompt without
            if not text.startswith(prompt):
                other_prompt = self._prompt(chat, number, where, enable_thinking=thinks)
                prompt = other_prompt if text.startswith(other_prompt) else prompt
        begin = len(prompt)
        if not text.startswith(prompt):
            if last:
                only = prompt[self._shared(prompt, text) :]
                raise UserError(
                    f"The chat template {self.template.name} ends the prompt for an answer with {only!r}, but does not "
                    f"write it before message {number + 1} of {where}, so the answer would not follow its prompt: {_MARK_THEM}."
                )
            begin = self._shared(prompt, self.text(_with(chat, number, {"content": SENTINEL}), where=where))
        other = _with(chat, number, _replaced(messages[number]))
        rest = _shared(text[::-1], self.text(other, where=where)[::-1])
        tail = _shared(alone[::-1], self.text(other | {"messages": other["messages"][: number + 1]}, where=where)[::-1])
        if rest == len(text):
            raise self._unwritten(f"message {number + 1} of {where}")
        end = len(text) - rest
        end += self._shared(text[end:], alone[len(alone) - tail :])  # what ends an earlier answer only is not learned
        if not begin <= end or not text.startswith(prompt[:begin]):
            raise UserError(
                f"The chat template {self.template.name} writes message {number + 1} of {where} in another way when more "
                f"messages follow, so the answers cannot be found: {_MARK_THEM}."
            )
        return begin, end

    def _shared(self, one: str, other: str) -> int:
        """With how many characters both begin, in whole tokens."""
        shared = _shared(one, other)
        near = [self._tokens.finditer(text, max(0, shared - 99), shared + 99) for text in (one, other)]
        return min([shared, *(token.start() for tokens in near for token in tokens if token.start() < shared < token.end())])

    def _prompt(self, chat: Chat, number: int, where: str, **options: bool) -> str:
        """The messages before ``number``, and the prompt for an answer."""
        given = {"messages": chat["messages"][:number], "chat_template_kwargs": chat.get("chat_template_kwargs", {}) | options}
        return self.text(chat | given, where=where, prompt=True)

    def _is_in(self, chat: Chat, number: int, learned: str, where: str, begin: int = 0) -> bool:
        """Whether what the message ``number`` says is in the ``learned`` text, perhaps changed."""
        message = chat["messages"][number]
        content, names = (message.get("content") or "").strip(), [_function(one).get("name") for one in _calls(message)]
        if names:  # then a template may leave out the content, as a thought
            return all(str(name) in learned for name in names)
        if content in learned:
            return True
        text, answers = self._marked(_with(chat, number, {"content": SENTINEL}), where)
        return any(SENTINEL in text[max(begin, first) : end] for first, end in answers)

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

    def _unwritten(self, where: str) -> UserError:
        return UserError(
            f"The chat template {self.template.name} writes nothing of what the assistant says in {where}, so it would not be "
            "learned: give another (--data.chat_template FILE.jinja)."
        )

    def _marked(self, chat: Chat, where: str) -> Rendered:
        """The text, and what the template marks of it: all of it if it has no marks."""
        if not self.template.marks_answers:
            text = self.text(chat, where=where)
            return Rendered(text, [(0, len(text))])
        texts, answers = self._call(chat, where, return_assistant_tokens_mask=True)
        return Rendered(texts[0], answers[0])

    def _call(self, chat: Chat, where: str, **options: bool) -> Any:
        given = {**self.template.special_tokens, **chat.get("chat_template_kwargs", {}), **options}
        try:
            return self._render(
                conversations=[chat["messages"]],
                chat_template=self.template.text,
                tools=chat.get("tools"),
                documents=chat.get("documents"),
                **given,
            )
        except Exception as error:  # a template is a program: whatever it raises is its answer to these messages
            line = f" in line {error.lineno} of it" if isinstance(error, self._syntax_error) else ""
            raise UserError(f"The chat template {self.template.name} cannot write {where}: {error}{line}.") from error


def _calls(message: Message) -> list[dict[str, Any]]:
    return message.get("tool_calls") or []


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """The same message, with other arguments in its calls."""
    calls = []
    for call in _calls(message):
        function = _function(call)
        changed = function | {"arguments": change(function["arguments"])} if "arguments" in function else function
        calls.append(changed if function is call else call | {"function": changed})
    return message | {"tool_calls": calls} if calls else message


def _replaced(message: Message) -> Message:
    """A message of which every text that its end can show is another."""
    content = {"content": SENTINEL} if message.get("content") or not _calls(message) else {}
    return _with_arguments(
        message | content, lambda given: dict.fromkeys(given or [SENTINEL], SENTINEL) if isinstance(given, dict) else SENTINEL
    )


def _as_object(arguments: Any) -> Any:
    """The object that a JSON text stands for; other arguments as they are."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else arguments


def _with(chat: Chat, number: int, changes: Message) -> Chat:
    messages = chat["messages"]
    return chat | {"messages": [*messages[:number], messages[number] | changes, *messages[number + 1 :]]}


def _shared(one: str, other: str) -> int:
    """With how many characters both begin."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
