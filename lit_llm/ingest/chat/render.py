"""From messages to text, and to the parts of it that the assistant writes."""

from __future__ import annotations

from typing import Any, NamedTuple

from lit_llm.errors import UserError
from lit_llm.ingest.chat.template import ChatTemplate
from lit_llm.ingest.optional_package import need

Message = dict[str, Any]

_PROBE = ({"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"})


class Rendered(NamedTuple):
    """A conversation as a template writes it."""

    text: str
    answers: list[tuple[int, int]]
    """Where the characters begin and end that the assistant writes, in order."""


class Renderer:
    """Write conversations with a template, in Jinja's environment of transformers.

    A template with {% generation %} says itself what the assistant writes. Of another, it is the text that a message of the
    assistant adds after the prompt for it: the conversation is written up to the message with the prompt, and up to and with
    the message. Both must be beginnings of the whole.

    Raises:
        UserError: transformers is not installed.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._render = need("transformers.utils.chat_template_utils", extra="hf", what="A chat template").render_jinja_template
        self._syntax_error = need("jinja2", extra="hf", what="A chat template").TemplateSyntaxError

    def check(self) -> None:
        """Raises:
        UserError: The template is damaged, or leaves out what the assistant says.
        """
        self.conversation(list(_PROBE), where="a question and an answer")

    def prompt(self, messages: list[Message], *, where: str) -> str:
        """The messages, and what comes before an answer."""
        return self._text(messages, where, add_generation_prompt=True)

    def conversation(self, messages: list[Message], *, where: str) -> Rendered:
        """A whole conversation.

        Args:
            where: names it in messages, like "conversation 3 of FILE".

        Raises:
            UserError: The template refuses the messages, or what the assistant writes cannot be found.
        """
        if self.template.marks_answers:
            text, answers = self._marked(messages, where)
        else:
            text = self._text(messages, where)
            answers = [self._answer(messages, i, text, where) for i, one in enumerate(messages) if one["role"] == "assistant"]
        if not any(begin < end for begin, end in answers) and any(
            one["role"] == "assistant" and one.get("content") for one in messages
        ):
            raise UserError(
                f"The chat template {self.template.name} writes no assistant turn in {where}, so nothing would be learned: "
                "give another (--data.chat_template FILE.jinja)."
            )
        return Rendered(text, answers)

    def _answer(self, messages: list[Message], number: int, text: str, where: str) -> tuple[int, int]:
        """Where the message ``number`` is in the text of all messages."""
        before = self._text(messages[:number], where, add_generation_prompt=True)
        after = text if number == len(messages) - 1 else self._text(messages[: number + 1], where)
        if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
            raise UserError(
                f"The chat template {self.template.name} writes message {number + 1} of {where} in another way when more "
                "messages follow, so the answers cannot be found: mark them in it with {% generation %} and "
                "{% endgeneration %} (--data.chat_template FILE.jinja)."
            )
        return len(before), len(after)

    def _marked(self, messages: list[Message], where: str) -> tuple[str, list[tuple[int, int]]]:
        texts, answers = self._call(messages, where, return_assistant_tokens_mask=True)
        return texts[0], answers[0]

    def _text(self, messages: list[Message], where: str, *, add_generation_prompt: bool = False) -> str:
        return self._call(messages, where, add_generation_prompt=add_generation_prompt)[0][0]

    def _call(self, messages: list[Message], where: str, **options: bool) -> Any:
        try:
            return self._render(
                conversations=[messages], chat_template=self.template.text, **options, **self.template.special_tokens
            )
        except Exception as error:  # a template is a program: whatever it raises is its answer to these messages
            line = f" in line {error.lineno} of it" if isinstance(error, self._syntax_error) else ""
            raise UserError(f"The chat template {self.template.name} cannot write {where}: {error}{line}.") from error
