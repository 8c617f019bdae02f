"""`python -m lit_llm chat`: talk to the model of a run folder, in a terminal or through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from lit_llm.commands.new_output import lock, refuse_inside
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.commands.text_model import TextModel, add_flags, for_output
from lit_llm.core.disk import naming
from lit_llm.core.errors import UserError, report
from lit_llm.ingest.chat import NoChatTemplate
from lit_llm.runs.run_folder import expanded

Message = dict[str, str]

HELP = """\
/system TEXT   begin anew with another system message; without a text none
/edit TEXT     replace your last message, and answer it
/retry         another answer to your last message
/undo          take back your last message and its answer
/clear         begin anew; the system message stays
/save FILE     append the conversation to a file, as a line of JSONL
/help          this list
/quit          end, as Ctrl-D does; Ctrl-C stops an answer
A message that begins with / has a space before it."""
_CONTINUED = 200  # most new ids without a chat template: a text has no end of turn


def own_flags() -> OwnFlags:
    flags = OwnFlags("chat", alone=True, description="Talk to a trained model. /help lists what you can do.")
    most = f"maximum number of new tokens of an answer (default: to its end; {_CONTINUED} without a chat template)"
    add_flags(flags, max_new_tokens=None, most_help=most)
    flags.add_argument("--system", help="system message of the conversation")
    flags.add_argument(
        "--transcript",
        type=Path,
        help="file to which each conversation is appended as a line of JSONL, which prepare --chat_template reads",
    )
    return flags


def main(arguments: list[str]) -> int:
    """Answer the lines of standard input; return the exit code. Answers go to standard output, other text to standard error.

    Ctrl-C stops an answer; at the prompt, it ends the command with code 130. On a pipe, the code is 2 if a line was refused.
    """
    options = own_flags().parse(arguments)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace", newline=None)  # bytes that are no text; lines of any system
    model = _model(options)
    block = model.config.block_size
    if (options.max_new_tokens or 0) > block:
        raise UserError(f"max_new_tokens is {options.max_new_tokens:,}, but the model reads {block:,} (--max_new_tokens)")
    talk, path = Conversation(model, options.system or ""), options.transcript
    opened = contextlib.nullcontext() if path is None else contextlib.closing(Transcript(path, options.run, "--transcript"))
    with opened as talk.transcript:
        model.load()
        return talk.hold()


def _model(options: argparse.Namespace) -> TextModel:
    try:
        return TextModel.of(options, chat=True)
    except NoChatTemplate as error:
        if options.system:
            raise UserError(f"{error} A system message needs one (--system)") from None
        report(f"{options.run} has no chat template: what you type is continued as text", kind="note")
        return TextModel.of(options, chat=False)


class Transcript:
    """Writer of a JSONL file with a conversation in each line. Each answer rewrites the line of the current conversation.

    Raises:
        UserError: The file cannot be written, lies in the run folder `run`, or is the open transcript of a chat.
    """

    def __init__(self, path: Path, run: str, name: str) -> None:
        refuse_inside(path, expanded(run), flag=name)
        self._path = path
        try:
            self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")  # noqa: SIM115  # until `close`
            self.close = self._file.close
            lock(self._file, f"{path} is the transcript of a chat that goes on: give another file ({name})")
            self._start = self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror} ({name})") from None
        if self._start and (self._file.seek(-1, os.SEEK_END), self._file.read())[1] != b"\n":
            self._start = self._file.write(b"\n") + self._start

    def write(self, record: dict[str, Any] | None) -> None:
        """Replace the line of the current conversation by `record`, as JSON; None: delete the line."""
        line = "" if record is None else json.dumps(record, ensure_ascii=False) + "\n"
        with naming(self._path):
            self._file.seek(self._start)
            self._file.write(line.encode("utf-8", "backslashreplace"))
            self._file.truncate()
            self._file.flush()

    def begin(self) -> None:
        """Begin a new conversation: the next `write` adds a line to the file."""
        self._start = self._file.seek(0, os.SEEK_END)


class Conversation:
    """A conversation with the model. With a chat template, the model gets all messages; without one, their joined texts."""

    def __init__(self, model: TextModel, system: str) -> None:
        self._model = model
        self._first = self._system(system, "--system")
        self._messages: list[Message] = []
        self._answers = 0
        self._in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.transcript: Transcript | None = None

    def hold(self) -> int:
        """Answer the lines of standard input until its end or the line /quit; return the exit code."""
        code = 0
        if self._in_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # `input` then edits lines, and remembers them
            print("/help lists what you can do.", file=sys.stderr)
        while True:
            try:
                line = input("> ") if self._in_terminal else sys.stdin.readline()
            except EOFError:
                print()
                return code
            if not line and not self._in_terminal:
                return code
            try:
                if self._took(line.removesuffix("\n")):
                    return code
            except UserError as error:
                report(str(error))
                code = 0 if self._in_terminal else 2

    def _took(self, line: str) -> bool:
        """Carry out a line of input: a command such as /undo, or a message. Return whether the line is /quit."""
        command, _, words = line.partition(" ")
        if line[:1] != "/":
            if self._model.chat is None or line.strip():
                self._answer([*self._messages, self._question(line)])
        elif command == "/quit":
            return True
        elif command == "/help":
            print(HELP, file=sys.stderr)
        elif command in ("/system", "/clear"):
            self._first = self._system(words.strip(), command) if command == "/system" else self._first
            self._messages = []
            if self.transcript is not None:
                self.transcript.begin()
        elif command not in ("/edit", "/retry", "/undo", "/save"):
            raise UserError(
                f"there is no {command}: /help lists what there is; a message that begins with / has a space before it"
            )
        elif not self._messages:
            raise UserError(f"there is no message for {command}")
        elif command in ("/edit", "/save") and not words.strip():
            raise UserError(f"there is nothing after {command}: /help lists what it takes")
        elif command == "/save":
            path, run = Path(os.path.expanduser(words.strip())), self._model.options.run
            with contextlib.closing(Transcript(path, run, "/save FILE")) as file:
                file.write(self._record())
        elif command == "/undo":
            self._become(self._messages[:-2])
        else:
            asked = self._question(words) if command == "/edit" else self._messages[-2]
            self._answer([*self._messages[:-2], asked])
        return False

    def _question(self, text: str) -> Message:
        """Return `text` as a message of the user, without spaces around it if there is a chat template."""
        return {"role": "user", "content": text if self._model.chat is None else text.strip()}

    def _system(self, text: str, key: str) -> list[Message]:
        """Return [`text` as the system message]; [] if `text` is empty.

        Raises:
            UserError: The template has no system message, or `text` leaves no room for messages. `key` names it in errors.
        """
        if not text.strip():
            return []
        if self._model.chat is None:
            raise UserError(f"a system message needs a chat template ({key})")
        first = [{"role": "system", "content": text}]
        self._model.chat_ids([*first, {"role": "user", "content": "?"}], where=f"the system message with a question ({key})")
        return first

    def _answer(self, messages: list[Message]) -> None:
        """Print the model's answer to `messages`, token by token. These messages and the answer become the conversation."""
        most, block = self._model.options.max_new_tokens, self._model.config.block_size
        if self._model.chat is None:
            ids, most = self._model.prompt_ids(_text(messages))[-block:], most or _CONTINUED
        else:
            mend = "the message is left out; /undo takes back what was said last, /clear all of it"
            ids = self._model.chat_ids([*self._first, *messages], where="the conversation with this message", mend=mend)
            room = block - len(ids)  # a longer text would lose the system message first
            most = min(most or room, room)
        said, count, is_stopped = "", 0, False
        try:
            for count, piece in enumerate(self._model.pieces(ids, most=min(most, block), number=self._answers)):  # noqa: B007
                said += piece
                print(for_output(piece), end="", flush=True)
        except KeyboardInterrupt:
            is_stopped = True
        print(flush=True)
        self._answers += 1  # each answer has a seed of its own
        if said or not is_stopped:
            self._become([*messages, {"role": "assistant", "content": said}])
        if self._model.chat is not None and count == most:
            limit = " (--max_new_tokens)" if most < room else f", and the model reads {block:,} in all"
            report(f"the answer ends here: it has {most:,} token{'s' * (most > 1)}{limit}", kind="note")
        if is_stopped and not self._in_terminal:
            raise KeyboardInterrupt

    def _become(self, messages: list[Message]) -> None:
        self._messages = messages
        if self.transcript is not None:
            self.transcript.write(self._record())

    def _record(self) -> dict[str, Any] | None:
        """Return the conversation as an object for JSONL, with the key "messages" or "text"; None before an answer."""
        if not self._messages:
            return None
        return {"text": _text(self._messages)} if self._model.chat is None else {"messages": [*self._first, *self._messages]}


def _text(messages: list[Message]) -> str:
    """Return the contents of all messages, joined. A user's message begins on a new line, unless it is first or empty."""
    text = ""
    for one in messages:
        text += ("\n" if text and one["role"] == "user" and one["content"] else "") + one["content"]
    return text
