"""`python -m lit_llm import`: convert a Hugging Face folder to a run folder."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import torch

from lit_llm.checkpoint import format
from lit_llm.checkpoint.crash_safe import make_folder
from lit_llm.cli.new_output import REPLACE_HELP, new_folder
from lit_llm.cli.own_flags import OwnFlags, true_or_false
from lit_llm.errors import UserError
from lit_llm.hf.config_map import ARCHITECTURES, read_config
from lit_llm.hf.read import CONFIG, WeightFiles, read_json, read_weights
from lit_llm.hf.tensor_map import links
from lit_llm.hf.tokenizer_files import copy_companions
from lit_llm.models.gpt import GPT
from lit_llm.runs.lock import RunLock
from lit_llm.runs.run_folder import CHECKPOINTS
from lit_llm.runs.run_folder import CONFIG as RUN_CONFIG
from lit_llm.runs.tokenizer_file import TOKENIZER_SHA256, tokenizer_sha256
from lit_llm.tokenizers import TOKENIZER_FILE, load_tokenizer
from lit_llm.yaml_reading import dump_yaml

STEP_0 = "step-00000000.ckpt"


def own_flags() -> OwnFlags:
    flags = OwnFlags(
        alone=True,
        prog="python -m lit_llm import",
        description=f"Create a run folder from a Hugging Face folder. Families: {', '.join(ARCHITECTURES)}.",
    )
    flags.add_argument("--from", dest="folder", required=True, help="folder with config.json and safetensors")
    flags.add_argument("--out", required=True, help="run folder to create, like runs/llama")
    flags.add_argument("--replace", type=true_or_false, default=False, help=REPLACE_HELP)
    return flags


def import_folder(folder: Path, run: Path, *, replace: bool = False) -> list[str]:
    """Write the run folder `run` from the Hugging Face folder `folder`; returns notes for the user, one sentence each.

    The checkpoint has weights and the model's settings, at step 0 and in the folder's dtype. config.yaml names the tokenizer.
    So `validate`, `generate` and `fit --init_from` work with the run. `run` is written completely or not at all.

    Raises:
        UserError: `run` exists, `folder` is not a model of a known family, or tensors are missing.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a Hugging Face model: it has no {CONFIG} (--from)")
    content = read_json(folder / CONFIG)
    try:
        config, notes = read_config(content)
    except UserError as error:
        raise UserError("\n".join(f"{folder / CONFIG}: {line}" for line in str(error).splitlines())) from None
    weight_files = WeightFiles(folder)
    if config.n_layer > len(weight_files.files):  # before a layer is built
        raise UserError(
            f"{folder / CONFIG} has {config.n_layer:,} layers, but the weights are {len(weight_files.files):,} tensors"
        )
    with torch.device("meta"):
        model = GPT(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert config.vocab_size is not None
    weights = read_weights(weight_files, links(content), shapes, config.vocab_size)
    settings = asdict(config)
    recipe: dict[str, object] = {"model": settings}
    has_tokenizer = (folder / TOKENIZER_FILE).is_file()
    if has_tokenizer:
        read_by = load_tokenizer(folder)
        if read_by.vocab_size > config.vocab_size:
            raise UserError(
                f"{folder / TOKENIZER_FILE} has {read_by.vocab_size} ids, but vocab_size in {CONFIG} is {config.vocab_size}"
            )
        if opening := read_by.prefix_token_ids:
            notes.append(
                f"this model was trained with {read_by.decode(opening)} before every text: add it with generate "
                "--prefix_token_ids. lit_llm's training data do not contain it"
            )
        tokenizer = {"class_path": "TokenizerJSON", "init_args": {"path": str(run / TOKENIZER_FILE)}}
        recipe["data"] = {"class_path": "PythonStdlib", "init_args": {"tokenizer": tokenizer}}
    else:
        notes.append(
            f"{folder} has no {TOKENIZER_FILE}, so text cannot be tokenized; "
            "create it with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    RunLock(run).refuse_if_held()  # by a `fit`
    with new_folder(run, replace=replace, sources=[folder]) as partial:
        make_folder(partial / CHECKPOINTS)
        if has_tokenizer:
            shutil.copyfile(folder / TOKENIZER_FILE, partial / TOKENIZER_FILE)
            copy_companions(folder, partial)
        title = f"# {ARCHITECTURES[content['model_type']]}, imported from {folder}. Other settings are defaults.\n"
        (partial / RUN_CONFIG).write_text(title + dump_yaml(recipe), encoding="utf-8")
        checkpoint: dict[str, Any] = {
            "state_dict": {f"model.{name}": weight for name, weight in weights.items()},
            "model_config": settings,
            "global_step": 0,
            "epoch": 0,
            "pytorch-lightning_version": lightning.__version__,
        }
        if has_tokenizer:
            checkpoint[TOKENIZER_SHA256] = tokenizer_sha256(partial)
        format.write(checkpoint, partial / CHECKPOINTS / STEP_0)
        (partial / CHECKPOINTS / "last.ckpt").symlink_to(STEP_0)
    return notes


def main(arguments: list[str]) -> int:
    """Import, and print the result and next steps.

    Raises:
        UserError: As in `import_folder`.
    """
    options = own_flags().parse(arguments)
    run = Path(options.out)
    notes = import_folder(Path(options.folder), run, replace=options.replace)
    saved = format.read(run / CHECKPOINTS / "last.ckpt", verify=False)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in saved["state_dict"].values()})
    count = sum(tensor.numel() for tensor in saved["state_dict"].values())
    print(f"{run}: {count:,} parameters in {', '.join(dtypes)}, context {saved['model_config']['block_size']:,}")
    for note in notes:
        print(f"note: {note}")
    print(
        f"generate:    python -m lit_llm generate --run {run} --prompt TEXT\n"
        f"fine-tune:   python -m lit_llm fit --init_from {run} --config RECIPE --data TextFiles --data.paths my.txt"
    )
    return 0
