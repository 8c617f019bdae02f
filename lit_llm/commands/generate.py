"""`python -m lit_llm generate`: generate text with the model of a run folder."""

from __future__ import annotations

import sys

import torch

from lit_llm.checkpoint.adapters import EMA_HELP
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import INT64, Domain, whole
from lit_llm.ingest.chat import AUTO, CHAT_TEMPLATE_FILE, ChatEncoder, ChatTemplate
from lit_llm.models.generation import Sampling, generate, prompt_ids
from lit_llm.runs.initial_weights import BASE_HELP, named_base
from lit_llm.runs.run_folder import expanded
from lit_llm.runs.saved_run import SavedRun, named_checkpoint
from lit_llm.tokenizers import load_tokenizer


def own_flags() -> OwnFlags:
    flags = OwnFlags("generate", alone=True, description="Continue a prompt with a trained model.")
    flags.add_argument("--run", required=True, help="run folder, like runs/quickstart")
    flags.add_argument("--prompt", default="", help="text to continue; empty starts a new document")
    flags.add_argument(
        "--chat",
        type=bool,
        help="the prompt is a user's message: write it as the run's chat template does, and print the answer",
    )
    flags.add_argument(
        "--prefix_token_ids",
        type=bool,
        help="start with the ids that an imported tokenizer puts before each text, such as LLaMA's <s>; a BOS token "
        "of the training data is always there",
    )
    flags.add_argument("--max_new_tokens", range=whole(1, 10**9), default=200, help="maximum number of new tokens")
    flags.add_argument(
        "--temperature", range=Domain(0.001, 1000, also=(0,)), default=0.8, help="0: greedy; 1: the model's own distribution"
    )
    flags.add_argument("--top_k", range=whole(0, 10**9), default=50, help="keep the k most likely tokens; 0 keeps all")
    flags.add_argument(
        "--top_p", range=Domain(0, 1, above_low=True), help="keep the smallest set of tokens with this total probability"
    )
    flags.add_argument("--seed", range=whole(-INT64, INT64), default=0, help="seed of the sampling")
    flags.add_argument("--ckpt_path", default="last", help="last, best, or a checkpoint file")
    flags.add_argument("--init_from", default=None, help=BASE_HELP)
    flags.add_argument("--ema", type=bool, help=EMA_HELP)
    flags.add_argument("--device", default="cpu", help="cpu, cuda, mps, …")
    return flags


def main(arguments: list[str]) -> int:
    """Print the prompt and its continuation, token by token. Of a chat, only the answer."""
    options = own_flags().parse(arguments)
    try:
        torch.zeros(1, device=options.device).item()
    except (RuntimeError, AssertionError):
        raise UserError(f"device {options.device} is not available on this machine (--device cpu)") from None
    sampling = Sampling(options.temperature, options.top_k or None, options.top_p, options.seed)
    run = expanded(options.run)
    checkpoint = named_checkpoint(run, options.ckpt_path)
    model = load_model(checkpoint, options.device, base=named_base(options.init_from), average=options.ema)
    saved = SavedRun.read(checkpoint)
    saved.require_tokenizer(run)
    tokenizer = load_tokenizer(run)
    stop_id = tokenizer.eos_id if model.config.eos_id is None else model.config.eos_id
    if options.chat:
        if options.prefix_token_ids:
            raise UserError("the chat template writes what comes before the prompt: remove --prefix_token_ids, or --chat")
        mend = f"train on chats, prepared with --chat_template, or write one to {run / CHAT_TEMPLATE_FILE}, or remove --chat"
        chat = ChatEncoder(tokenizer, ChatTemplate.find(AUTO, run, tokenizer, mend=mend))
        prompt, end_of_turn = chat.prompt_ids(options.prompt), chat.end_of_turn_id()
        stop_id = stop_id if end_of_turn is None else end_of_turn
    else:
        prefix = tokenizer.prefix_token_ids if options.prefix_token_ids else saved.prompt_start
        prompt = prompt_ids(tokenizer, options.prompt, prefix=prefix)
        sys.stdout.write(options.prompt)
    # A token may end inside a character, so only whole characters are printed.
    new_ids: list[int] = []
    printed = ""
    new = generate(
        model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop_id=stop_id,
        vocab_size=tokenizer.vocab_size,
    )
    for token in new:
        new_ids.append(token)
        text = tokenizer.decode(new_ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            sys.stdout.write(text[len(printed) :])
            sys.stdout.flush()
            printed = text
    sys.stdout.write(tokenizer.decode(new_ids)[len(printed) :] + "\n")
    return 0
