"""Train on files that the user names: text, or conversations in which only the assistant's tokens are targets."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from lit_llm.core.errors import UserError, noting
from lit_llm.core.number_domain import Domain
from lit_llm.data.text import TextDataModule
from lit_llm.ingest.chat import ChatEncoder, ChatTemplate
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.paths import list_sources, same_files
from lit_llm.ingest.readers import DocumentReader, ReadSettings
from lit_llm.ingest.selection import hold_out
from lit_llm.ingest.source import Source
from lit_llm.tokenizers import TokenizerJSON

_MAX_PROBLEMS = 5


def _in_both(ours: list[Source], others: list[Source]) -> list[str]:
    """The names of those files in ``others`` that are in ``ours`` too, perhaps under another name (such as a link)."""
    here, there = ([Path(source.path) for source in each if source.is_local] for each in (ours, others))
    remote = {source.path for source in ours if not source.is_local}
    return [str(path) for _, path in same_files(here, there)] + [source.name for source in others if source.path in remote]


class GivenFiles(TextDataModule):
    """Base class of the data modules whose user names files. A subclass says how the files are read.

    Args:
        paths: files for training and validation.
        train: files for training only.
        val: files for validation, used with ``train``. None: ``val_fraction`` of ``train``.
        test: files for ``test``.
        val_fraction: fraction to hold out if ``val`` is not given.
        kwargs: the arguments of ``TextDataModule``.
    """

    def __init__(
        self,
        *,
        paths: str | list[str] | None = None,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: Annotated[float, Domain(0, 1, above_low=True, below_high=True)] = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.paths, self.train, self.val, self.test = paths, train, val, test
        self.val_fraction = val_fraction
        self._plain: dict[Source, bool] = {}
        self._listed: dict[str, tuple[list[Source], list[str]]] = {}  # flag → its files, listed once without problems

    @property
    def held_out(self) -> str:  # type: ignore[override]
        """A clause, for a line that `validate` prints, on which share of which files is validation text. "" with `val`."""
        if self.val is not None:
            return ""
        flag = "paths" if self.train is None else "train"
        whole = "to measure a whole file: --data.train OTHER --data.val FILE"
        return f", {self.val_fraction:.0%} of --data.{flag} (--data.val_fraction); {whole}"

    @property
    @abstractmethod
    def read_settings(self) -> ReadSettings:
        """The settings with which all files are read: their format, and the key of the text or messages."""

    def source_problems(self) -> list[str]:
        problems = []
        if self.paths is None and self.train is None:
            problems.append("No training text: give --data.paths, or --data.train and --data.val.")
        if self.paths is not None and (self.train is not None or self.val is not None):
            problems.append("--data.paths cannot be combined with --data.train or --data.val: it is split into both.")
        sources, path_problems = self._split_sources()
        problems += path_problems
        for held_out in ("val", "test"):
            flag = "paths" if self.train is None else "train"
            for path in _in_both(sources.get("train", []), sources.get(held_out, []))[:1]:
                problems.append(f"{path} is in both --data.{flag} and --data.{held_out}: remove it from one of them.")
        if not path_problems:
            problems += self._unreadable(sources)
        return problems

    def source_folders(self) -> list[Path]:
        given = [getattr(self, flag) for flag in ("paths", "train", "val", "test")]
        patterns = [pattern for one in given for pattern in ([one] if isinstance(one, str) else one or [])]
        return [folder for pattern in patterns if (folder := Path(pattern).expanduser()).is_dir()]

    def inputs(self) -> list[Input]:
        sources, _ = self._split_sources()
        inputs = {name: [Input(source, name, self.read_settings) for source in each] for name, each in sources.items()}
        if "val" not in inputs:
            plain = [one for one in inputs["train"] if one.source.is_local and self.is_plain_text(one.source)]
            others = [replace(one, split=None) for one in inputs["train"] if one not in plain]
            inputs["train"] = (hold_out(plain, self.val_fraction) if plain else []) + others
        return [one for each in inputs.values() for one in each]

    def is_plain_text(self, source: Source) -> bool:
        """Whether a local file is text, neither compressed nor in another format."""
        if source not in self._plain:
            with DocumentReader(source, self.read_settings) as reader:
                self._plain[source] = reader.is_plain_text
        return self._plain[source]

    def _unreadable(self, sources: dict[str, list[Source]]) -> list[str]:
        """A sentence for each local file that cannot be read as the settings say, at most ``_MAX_PROBLEMS`` sentences."""
        problems = []
        for source in (source for each in sources.values() for source in each if source.is_local):
            try:
                self.is_plain_text(source)
            except UserError as error:
                problems += [] if str(error) in problems else [str(error)]
                if len(problems) == _MAX_PROBLEMS:
                    break
        return problems

    def _split_sources(self) -> tuple[dict[str, list[Source]], list[str]]:
        """The sources of each split that the user gave (``paths`` is "train"), and a sentence for each problem of a path."""
        sources: dict[str, list[Source]] = {}
        problems: list[str] = []
        for flag in ("paths", "train", "val", "test"):
            if (patterns := getattr(self, flag)) is not None:
                listed, path_problems = self._listed.get(flag) or list_sources(patterns, flag=f"--data.{flag}")
                if not path_problems:
                    self._listed[flag] = listed, []
                sources["train" if flag == "paths" else flag] = listed
                problems += path_problems
        return sources, problems


class TextFiles(GivenFiles):
    """The data module for a user's text: plain files, JSONL, Parquet, Arrow and tar, compressed or not, local or remote.

    Give either ``paths``, part of which is held out for validation, or ``train`` and ``val``. Each setting is a file, a folder
    (every file below it that is not hidden), a glob (``**`` descends into folders), a URL, or a list of these. A file's content
    decides its format (``lit_llm.ingest.readers``), not its name.

    Of ten or more plain text files, whole files are held out, with about ``val_fraction`` of the bytes. Of fewer files, the end
    of each file is held out, from a line end on. Of other formats and remote files, documents are held out by a hash of their
    text (``lit_llm.ingest.selection``). A plain text file is one document. An end-of-document token follows each document.

    Args:
        format: auto, text, jsonl, parquet, arrow or tar. auto: as the content says. text: read every file as plain text.
        text_key: the key or column of the text in JSONL, Parquet, Arrow and JSON in tar. Dots descend: ``meta.body``.
        drop_near_duplicates: leave documents that nearly repeat a held-out document out of training. No effect with ``val``.
        kwargs: the arguments of ``GivenFiles``.
    """

    def __init__(
        self,
        *,
        format: Literal["auto", "text", "jsonl", "parquet", "arrow", "tar"] = "auto",
        text_key: str = "text",
        drop_near_duplicates: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.format, self.text_key = format, text_key
        self.drop_near_duplicates = drop_near_duplicates and self.val is None

    @property
    def read_settings(self) -> ReadSettings:
        return ReadSettings(self.format, self.text_key)

    def source_problems(self) -> list[str]:
        problem = self.source_tokenizer.eos_problem()
        return [*super().source_problems(), *([] if problem is None else [problem])]


class ChatFiles(GivenFiles):
    """The data module for conversations in JSONL, Parquet, Arrow and datasets of the Hugging Face hub.

    A line or row is a conversation: a list of messages with "role" and "content", or with ShareGPT's "from" and "value". A chat
    template renders a conversation as one document, without other tokens. Targets are the tokens that the assistant writes,
    with the end of its turn (``lit_llm.ingest.chat``). Without ``val``, conversations are held out by a hash of their content.

    Args:
        messages_key: the key or column of the messages. Dots descend: ``data.messages``.
        chat_template: a file with a Jinja template. auto: the tokenizer's own template, in a file beside its tokenizer.json.
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
        problems: list[str] = []
        with noting(problems):
            ChatEncoder(self.source_tokenizer, self.chat_template).check()
        return problems
