"""`python -m lit_llm export`: write a run for transformers, llama.cpp, peft, torch.load or torch.distributed.checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from lit_llm.callbacks._torch import AVERAGE
from lit_llm.checkpoint.adapters import BASE, EMA_HELP, LORA, averaged, saved_lora, saved_weights
from lit_llm.checkpoint.compatibility import saved_architecture, saved_model_config
from lit_llm.checkpoint.crash_safe import HashingFile
from lit_llm.checkpoint.dcp_export import write_dcp
from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.load_weights import mismatch
from lit_llm.commands.new_output import REPLACE_HELP, new_file, new_folder
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.disk import write_json
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import above
from lit_llm.hf.config_map import links, write_config
from lit_llm.hf.gguf_file import QUANTISED, architecture_of, package, write_gguf
from lit_llm.hf.gguf_tokenizer import tokenizer_keys
from lit_llm.hf.peft import write_adapter
from lit_llm.hf.read import CONFIG
from lit_llm.hf.remote_code import code_config, own_names, write_code
from lit_llm.hf.tensor_map import CHOICE_BIAS, Link
from lit_llm.hf.write import write_weights
from lit_llm.models.gpt import GPTConfig, weights_on_meta, without_ahead
from lit_llm.models.lora import MergedTensor, merged_weights
from lit_llm.runs.init_from import BASE_HELP, named_base
from lit_llm.runs.run_folder import expanded, run_of
from lit_llm.runs.saved_run import SavedRun, named_checkpoint
from lit_llm.runs.tokenizer_files import imported_family, write_generation_config, write_tokenizer
from lit_llm.tokenizers import TOKENIZER_FILE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def own_flags() -> OwnFlags:
    flags = OwnFlags(
        "export", alone=True, description="Create a folder for transformers' AutoModelForCausalLM and AutoTokenizer from a run."
    )
    flags.add_argument("--run", required=True, help="run folder, like runs/quickstart")
    flags.add_argument("--out", required=True, help="folder to create; with --format ckpt or gguf a file")
    flags.add_argument(
        "--format",
        choices=["transformers", "code", "gguf", "ckpt", "dcp"],
        default="transformers",
        help="code: with a modelling file, for trust_remote_code. gguf: one file for llama.cpp, Ollama and LM Studio. ckpt: "
        "the whole checkpoint, optimizer state included, as one file in Lightning's format. dcp: the same for "
        "torch.distributed.checkpoint.load",
    )
    flags.add_argument("--ckpt_path", default="last", help="last, best, or a checkpoint file")
    flags.add_argument(
        "--dtype",
        choices=[*DTYPES, QUANTISED],
        help=f"dtype of the written weights; default: as in the checkpoint; {QUANTISED} with --format gguf only",
    )
    flags.add_argument("--max_shard_gb", range=above(0), default=5.0, help="maximum size of a weight file, in GB (1e9 bytes)")
    flags.add_argument("--adapter", type=bool, help="of a LoRA run: write only its adapter, for the package peft, unmerged")
    flags.add_argument("--weights", type=bool, help="with --format ckpt: leave out the optimizer state")
    flags.add_argument("--init_from", help=BASE_HELP)
    flags.add_argument("--ema", type=bool, help=EMA_HELP)
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    return flags


@dataclass(frozen=True)
class Source:
    """Record of the checkpoint to export, and how.

    Attributes:
        run: the run folder, which has the tokenizer of the checkpoint.
        base: the checkpoint of a LoRA run's base weights. None: the path that the run recorded.
        average: whether to export the moving average of the weights (EMA) instead of the weights.
    """

    checkpoint: Path
    run: Path
    base: Path | None = None
    average: bool = False


def export_folder(
    source: Source, out: Path, *, dtype: torch.dtype | None, max_bytes: float, replace: bool = False, code: bool = False
) -> tuple[str, list[str]]:
    """Write the folder `out` for transformers: config.json, weights and tokenizer. Adapters are merged into their base weights.

    Args:
        code: write a modelling file, even if transformers has an equivalent class.

    Returns:
        (name of the model class in config.json; notes for the user, one sentence each).

    Raises:
        UserError: `out` exists, the checkpoint is not lit_llm's, or settings have no equivalent (one sentence each).
    """
    run = source.run
    with new_folder(out, replace=replace, sources=[run, source.checkpoint]) as partial:
        saved, config = _saved(source)
        assert config.vocab_size is not None  # a checkpoint contains the resolved vocabulary size
        content, notes = (code_config(config), []) if code else write_config(config, _family(saved, run))
        table = own_names(config) if code else links(content)
        if code:
            write_code(partial)
        state = _weights(source, saved, config, content, table, dtype)
        if (run / TOKENIZER_FILE).exists():
            write_tokenizer(run, partial, block_size=config.block_size)
        else:
            notes.append(f"{run} has no {TOKENIZER_FILE}: the folder has weights only")
        content |= write_generation_config(run, partial, eos_id=config.eos_id)
        written = dtype or state["embedding.weight"].dtype
        write_json(content | {"torch_dtype": str(written).removeprefix("torch.")}, partial / CONFIG)
        write_weights(state, table, partial, vocab_size=config.vocab_size, dtype=dtype, max_bytes=max_bytes)
    return str(content["architectures"][0]), notes


def export_gguf(source: Source, out: Path, *, dtype: str | None, replace: bool = False) -> tuple[str, list[str]]:
    """Write the GGUF file `out` for llama.cpp. `dtype`: a key of `DTYPES`, or q8_0; None: as in the checkpoint.

    Returns (architecture and dtype as text, notes for the user).

    Raises:
        UserError: `out` exists, the checkpoint is not lit_llm's, or GGUF cannot express a setting or the tokenizer.
    """
    with new_file(out, replace=replace) as partial:
        package()
        saved, config = _saved(source)
        content, notes = write_config(config, _family(saved, source.run))
        architecture = architecture_of(config, content["model_type"])
        vocabulary, more = tokenizer_keys(source.run, config)
        merged = torch.float32 if dtype == QUANTISED else None if dtype is None else DTYPES[dtype]
        state = _weights(source, saved, config, content, links(content), merged)
        written = dtype or str(state["embedding.weight"].dtype).removeprefix("torch.")
        more += write_gguf(partial, state, links(content), config, architecture, vocabulary, written)
    return f"{architecture.name} of llama.cpp in {written}", notes + more


def _saved(source: Source) -> tuple[dict[str, Any], GPTConfig]:
    """Return (the dict of the checkpoint, the configuration of its model). Raise a UserError for a custom architecture."""
    checkpoint = source.checkpoint
    saved = read(checkpoint)
    SavedRun(checkpoint, saved).require_tokenizer(source.run)
    config = saved_model_config(saved, checkpoint, "--ckpt_path")
    if (architecture := saved_architecture(saved)) is not None:
        raise UserError(
            f"transformers has no class for {architecture.class_path}, the model of {checkpoint}: write its weights with "
            "--format ckpt instead"
        )
    return saved, config


def _weights(
    source: Source,
    saved: dict[str, Any],
    config: GPTConfig,
    content: dict[str, Any],
    table: list[Link],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Return {our name: tensor} of all weights that predict the next token. Adapters are merged, into tensors of `dtype`."""
    checkpoint, state = source.checkpoint, {}
    average = "--ema" if source.average else None
    weights = saved_weights(saved, checkpoint, base=source.base, verify=True, average=average)
    if problem := mismatch(weights_on_meta(config), weights, f"{checkpoint} (--run)"):
        raise UserError(problem)
    for name, tensor in without_ahead(weights, config).items():
        state[name] = tensor[...].to(dtype or tensor.dtype) if isinstance(tensor, MergedTensor) else tensor[...]
    named = {name for link in table for name in link.ours}
    for name in state.keys() - named:
        if name.endswith(CHOICE_BIAS) and state[name].any():
            raise UserError(
                f"{checkpoint} has a bias for the choice of experts ({name}), and {content['architectures'][0]} has none: "
                "train with --expert_balance null and --model.moe.balance 0.01 to export the run (--run)"
            )
    return state


def _family(saved: dict[str, Any], run: Path) -> str | None:
    """Return the `model_type` of the folder from which a run or its base weights were imported; None if neither was."""
    base = [run_of(Path(saved[BASE]["path"]))] if BASE in saved else []
    return next((family for each in [run, *base] if (family := imported_family(each)) is not None), None)


def export_adapter(source: Source, out: Path, *, dtype: torch.dtype | None, replace: bool = False) -> int:
    """Write the adapter of a LoRA run, for peft, and the tokenizer into the folder `out`; return the number of adapted layers.

    Raises:
        UserError: `out` exists, the checkpoint holds no adapter, or its model has no equivalent in transformers.
    """
    checkpoint, run = source.checkpoint, source.run
    with new_folder(out, replace=replace, sources=[run, checkpoint]) as partial:
        saved = read(checkpoint)
        lora = saved_lora(saved)
        if lora is None:
            raise UserError(f"{checkpoint} holds a whole model and no adapter: leave out --adapter")
        config = saved_model_config(saved, checkpoint, "--ckpt_path")
        content, _ = write_config(config, _family(saved, run))
        base = weights_on_meta(config)
        state = averaged(saved, checkpoint, "--ema") if source.average else saved["state_dict"]
        adapters = {name.removeprefix("model."): tensor[...] for name, tensor in state.items()}
        merged_weights(base, adapters, lora)  # raises unless they fit
        shapes = {name: tensor.shape for name, tensor in base.items()}
        if (run / TOKENIZER_FILE).exists():
            write_tokenizer(run, partial, block_size=config.block_size)
            write_generation_config(run, partial, eos_id=config.eos_id)
        return write_adapter(without_ahead(adapters, config), lora, links(content), shapes, partial, dtype)


def export_checkpoint(source: Source, out: Path, *, weights: bool, replace: bool = False) -> tuple[str, list[str]]:
    """Write the checkpoint, which must fit in memory, as one file `out`, for torch.load, `--resume` and `--ckpt_path`.

    Args:
        weights: whether to leave out the states of the optimizer and of schedulers.
        replace: whether to replace an existing file `out`.

    Returns:
        (description of the written file, notes for the user, one sentence each).
    """
    checkpoint = source.checkpoint
    with new_file(out, replace=replace) as partial:
        content, left_out = read(checkpoint), ("optimizer_states", "lr_schedulers") if weights else ()
        if source.average:
            content["state_dict"], left_out = averaged(content, checkpoint, "--ema"), (*left_out, AVERAGE)
        content = {key: value for key, value in content.items() if key not in left_out}
        with HashingFile(partial) as file:
            torch.save(content, cast(IO[bytes], file))
    notes = ["a run that resumes it continues from the average"] if source.average and not weights else []
    if LORA in content:
        notes.append(f"it holds adapters only; their base weights stay in {content[BASE]['path']} (`export` merges both)")
    return f"step {content.get('global_step')}, {out.stat().st_size:,} bytes", notes


_NOT_WITH = {  # kind of output → (why some flags do not apply, these flags)
    "dcp": ("--format dcp writes the checkpoint as it is", ("dtype", "max_shard_gb", "adapter", "init_from", "ema")),
    "ckpt": ("--format ckpt writes the checkpoint as it is", ("dtype", "max_shard_gb", "adapter", "init_from")),
    "gguf": ("--format gguf writes a whole model into one file", ("adapter", "max_shard_gb")),
    "code": ("--format code writes a whole model", ("adapter",)),
    "adapter": ("--adapter writes the adapter alone, into one file", ("init_from", "max_shard_gb")),
    "transformers": ("", ()),
}


def main(arguments: list[str]) -> int:
    """Run the command `export` with its arguments, print what was written, and return the exit code."""
    flags = own_flags()
    options = flags.parse(arguments)
    run, out = expanded(options.run), Path(options.out)
    checkpoint = named_checkpoint(run, options.ckpt_path)
    kind = "adapter" if options.adapter and options.format == "transformers" else options.format
    why, others = _NOT_WITH[kind]
    if unused := [f"--{name}" for name in others if getattr(options, name) != flags.get_default(name)]:
        raise UserError(f"{why}: leave out {', '.join(unused)}")
    if options.dtype == QUANTISED and kind != "gguf":
        raise UserError(f"--dtype {QUANTISED} is of --format gguf only")
    if options.weights and kind != "ckpt":
        raise UserError("--weights is of --format ckpt only")
    dtype, notes, replace = DTYPES.get(options.dtype), list[str](), options.replace
    source = Source(checkpoint, run, named_base(options.init_from), options.ema)
    if kind == "dcp":
        with new_folder(out, replace=replace, sources=[checkpoint]) as partial:
            tensors = write_dcp(read(checkpoint, lazy=True), partial)
        what = f"{tensors:,} tensors for torch.distributed.checkpoint.load"
    elif kind == "ckpt":
        what, notes = export_checkpoint(source, out, weights=options.weights, replace=replace)
    elif kind == "adapter":
        layers = export_adapter(source, out, dtype=dtype, replace=replace)
        what = f"an adapter of {layers} layers, for peft.PeftModel.from_pretrained"
    elif kind == "gguf":
        what, notes = export_gguf(source, out, dtype=options.dtype, replace=replace)
        what += f", {out.stat().st_size:,} bytes"
    else:
        size, code = options.max_shard_gb * 1e9, kind == "code"
        what, notes = export_folder(source, out, dtype=dtype, max_bytes=size, replace=replace, code=code)
        sizes = [file.stat().st_size for file in out.glob("*.safetensors")]
        what += f", {sum(sizes):,} bytes of weights in {len(sizes)} file{'s' * (len(sizes) > 1)}"
    print(f"{out}: {what}, from {checkpoint}")
    for note in notes:
        print(f"note: {note}")
    return 0
