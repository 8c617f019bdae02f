"""What `generate` and `chat` share: their flags, and the model of a run with its tokenizer and chat template."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lit_llm.checkpoint.adapters import EMA_HELP
from lit_llm.checkpoint.compatibility import saved_model_config
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.errors import UserError, refuse
from lit_llm.core.hardware import chosen_device, device_problem
from lit_llm.core.number_domain import INT64, Domain, whole
from lit_llm.ingest.chat import AUTO, CHAT_TEMPLATE_FILE, ChatEncoder, ChatTemplate
from lit_llm.models.config import GPTConfig
from lit_llm.models.generation import Sampling, Texts, end_id, generate_all, prompt_ids, text_pieces
from lit_llm.runs.init_from import BASE_HELP, named_base
from lit_llm.runs.run_folder import expanded
from lit_llm.runs.saved_run import SavedRun, named_checkpoint, no_tokenizer
from lit_llm.tokenizers import Tokenizer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


def add_flags(flags: OwnFlags, *, max_new_tokens: int | None, most_help: str) -> None:
    """Add the flags of model and sampling. `max_new_tokens`: default of the flag of this name; `most_help`: its help."""
    flags.add_argument("--run", required=True, help="run folder, like runs/quickstart")
    flags.add_argument(
        "--prefix_token_ids",
        type=bool,
        help="start with the ids that an imported tokenizer puts before each text, such as LLaMA's <s>; a BOS token "
        "of the training data is always there",
    )
    flags.add_argument("--max_new_tokens", range=whole(1, 10**9), default=max_new_tokens, help=most_help)
    flags.add_argument(
        "--temperature", range=Domain(0.001, 1000, also=(0,)), default=0.8, help="0: greedy; 1: the model's own distribution"
    )
    flags.add_argument("--top_k", range=whole(0, 10**9), default=50, help="keep the k most likely tokens; 0 keeps all")
    flags.add_argument(
        "--top_p", range=Domain(0, 1, above_low=True), help="keep the smallest set of tokens with this total probability"
    )
    flags.add_argument("--seed", range=whole(-INT64, INT64), default=0, help="seed of the sampling")
    flags.add_argument("--ckpt_path", default="last", help="last, best, or a checkpoint file")
    flags.add_argument("--init_from", help=BASE_HELP)
    flags.add_argument("--ema", type=bool, help=EMA_HELP)
    flags.add_argument("--device", default="auto", help="cpu, cuda, mps, …; auto: a GPU if there is one, else cpu")


def for_output(text: str, file: TextIO | None = None) -> str:
    """Return `text` for `file` (None: standard output): for a terminal, with control characters written like `\\x1b`."""
    return _CONTROL.sub(lambda each: rf"\x{ord(each[0]):02x}", text) if (file or sys.stdout).isatty() else text


@dataclass
class TextModel:
    """Model of a run with its tokenizer, to continue prompts. `load` loads the weights, after `of` has checked flags.

    Attributes:
        chat: encodes messages in the form of the run's chat template. None: prompts are text to continue.
        stop_id: the id that ends a text; None: no id does.
        texts: the loaded model; None before `load`.
    """

    options: argparse.Namespace
    checkpoint: Path
    saved: SavedRun
    tokenizer: Tokenizer
    config: GPTConfig
    sampling: Sampling
    chat: ChatEncoder | None
    stop_id: int | None
    texts: Texts | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, *, chat: bool) -> TextModel:
        """Read tokenizer and settings of the run that the flags in `options` name. `chat`: use the run's chat template.

        Raises:
            UserError: The device or the run does not exist, or the run's files do not fit together.
            NoChatTemplate: `chat` is true, but the run has no chat template.
        """
        options.device = chosen_device(options.device)
        refuse(filter(None, [device_problem(options.device)]))
        sampling = Sampling(options.temperature, options.top_k or None, options.top_p, options.seed)
        run = expanded(options.run)
        checkpoint = named_checkpoint(run, options.ckpt_path)
        saved = SavedRun.read(checkpoint)
        config = saved_model_config(saved.values, checkpoint, "--ckpt_path")
        if (tokenizer := saved.tokenizer(run)) is None:
            raise no_tokenizer(run)
        stop_id, encoder = end_id(tokenizer, config), None
        if chat:
            mend = f"train on chats, prepared with --chat_template, or write one to {run / CHAT_TEMPLATE_FILE}"
            mend += ", or remove --chat" if "chat" in options else ""
            encoder = ChatEncoder(tokenizer, ChatTemplate.find(AUTO, run, tokenizer, mend=mend))
            if options.prefix_token_ids:
                raise UserError("the chat template writes what comes before the prompt: remove --prefix_token_ids")
            end_of_turn = encoder.end_of_turn_id()
            stop_id = stop_id if end_of_turn is None else end_of_turn
        return cls(options, checkpoint, saved, tokenizer, config, sampling, encoder, stop_id)

    def load(self) -> None:
        """Load the weights of the checkpoint.

        Raises:
            UserError: The checkpoint is damaged, or its base weights are missing.
        """
        options = self.options
        model = load_model(self.checkpoint, options.device, base=named_base(options.init_from), average=options.ema)
        self.texts = Texts(model)

    def prompt_ids(self, prompt: str, *, where: str = "the prompt (--prompt)") -> list[int]:
        """Return the ids of `prompt`: with a chat template a user's message, else text to continue. `where` names it in errors.

        Raises:
            UserError: the template refuses the prompt, no room for an answer is left, or an empty prompt has no first id.
        """
        if self.chat is not None:
            return self.chat_ids([{"role": "user", "content": prompt}], where=where)
        prefix = self.tokenizer.prefix_token_ids if self.options.prefix_token_ids else self.saved.prompt_start
        return prompt_ids(self.tokenizer, prompt, prefix=prefix)

    def chat_ids(self, messages: list[dict[str, str]], *, where: str, mend: str = "shorten it") -> list[int]:
        """Return the ids of a conversation up to the beginning of an answer. `where`, `mend`: its name and a remedy for errors.

        Raises:
            UserError: The template refuses the messages, or the model's block size leaves no room for an answer.
        """
        assert self.chat is not None
        ids, block = self.chat.prompt_ids(messages, where=where), self.config.block_size
        if len(ids) >= block:
            raise UserError(f"{where} has {len(ids):,} tokens, and the model reads {block:,}: {mend}")
        return ids

    def continued(self, prompts: list[list[int]], *, most: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (index of a prompt, its next id), at most `most` for each. The seed for prompt i depends on `first` + i."""
        assert self.texts is not None
        samplings = [self.sampling.numbered(first + i) for i in range(len(prompts))]
        size, stop_id = self.tokenizer.vocab_size, self.stop_id
        return generate_all(self.texts, prompts, max_new_tokens=most, samplings=samplings, stop_id=stop_id, vocab_size=size)

    def pieces(self, prompt: list[int], *, most: int, number: int = 0) -> Iterator[str]:
        """Yield the continuation of one prompt, of at most `most` tokens, as pieces of text. `number` changes the seed."""
        return text_pieces(self.tokenizer, (token for _, token in self.continued([prompt], most=most, first=number)))
