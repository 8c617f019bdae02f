"""`python -m lit_llm import`: convert a folder of Hugging Face or of torch.distributed.checkpoint (DCP) to a run folder."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import torch

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.adapters import BASE, LORA, base_record, saved_weights
from lit_llm.checkpoint.compatibility import saved_architecture, saved_model_config
from lit_llm.checkpoint.crash_safe import make_folder
from lit_llm.checkpoint.dcp_folder import DcpFolder, is_dcp_folder
from lit_llm.checkpoint.load_weights import mismatch
from lit_llm.commands.new_output import REPLACE_HELP, new_folder
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.disk import read_object, write_json
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import comment, dump_yaml
from lit_llm.hf.config_map import ARCHITECTURES, links, read_config, unread_layers, write_config
from lit_llm.hf.dcp_weights import DcpWeightFiles, own_weights
from lit_llm.hf.families import FAMILIES
from lit_llm.hf.peft import is_adapter_folder, read_adapter
from lit_llm.hf.read import CONFIG, WeightFiles, read_weights, refuse_first_five, text_config
from lit_llm.models.gpt import weights_on_meta
from lit_llm.models.upcycling import upcycled
from lit_llm.runs.init_from import InitialWeights
from lit_llm.runs.lock import RunLock
from lit_llm.runs.run_folder import CHECKPOINTS, run_of
from lit_llm.runs.run_folder import CONFIG as RUN_CONFIG
from lit_llm.runs.saved_run import TOKENIZER_SHA256, tokenizer_sha256
from lit_llm.runs.tokenizer_files import IMPORTED_CONFIG, TOKENIZER_COMPANIONS, copy_companions, imported_family
from lit_llm.tokenizers import TOKENIZER_FILE, load_tokenizer

STEP_0 = "step-00000000.ckpt"


def own_flags() -> OwnFlags:
    flags = OwnFlags(
        "import",
        alone=True,
        description=f"Create a run folder from a folder of Hugging Face, or of torch.distributed.checkpoint (DCP). "
        f"Families: {', '.join(ARCHITECTURES)}.",
    )
    flags.add_argument(
        "--from", dest="folder", required=True, help="folder with config.json and safetensors, or with .metadata (DCP)"
    )
    flags.add_argument(
        "--config_from",
        help="if --from is a DCP folder of another program, such as torchtitan: the Hugging Face folder with the model's "
        "config.json and tokenizer",
    )
    flags.add_argument("--out", required=True, help="run folder to create, like runs/llama")
    flags.add_argument("--init_from", help="if --from is an adapter of the package peft: the run folder of its base weights")
    text = "make a mixture of so many experts of a dense model, each its MLP; two compute a token"
    flags.add_argument("--upcycle", type=int, help=text)
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    return flags


def import_folder(
    folder: Path, run: Path, *, replace: bool = False, dcp: Path | None = None, experts: int | None = None
) -> list[str]:
    """Write the run folder `run` from the Hugging Face folder `folder`; return notes for the user, one sentence each.

    The run has a checkpoint of step 0, with the weights in the folder's dtype and the model's settings, the tokenizer, and a
    config.yaml, for `validate`, `generate` and `fit --init_from`. `run` is written completely or not at all.

    Args:
        dcp: a folder of torch.distributed.checkpoint with the weights. None: the weights are in `folder`.
        experts: the number of experts, to make a mixture of experts of a dense model. None: the model is not changed.

    Raises:
        UserError: `run` exists, `folder` does not exist or is no model of a known family, or tensors are missing.
    """
    if not folder.exists() and len(folder.parts) == 2:
        raise UserError(
            f"there is no folder {folder}; if this is a model on Hugging Face, download it by "
            f"`hf download {folder} --local-dir {folder.name}` (--from {folder.name})"
        )
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a Hugging Face model: it has no {CONFIG} (--from)")
    whole = read_object(folder / CONFIG)
    text = text_config(whole)
    content = whole if text is None else text
    try:
        config, notes = read_config(content)
    except UserError as error:
        raise UserError("\n".join(f"{folder / CONFIG}: {line}" for line in str(error).splitlines())) from None
    if text is not None:
        notes.append(f"of {whole['model_type']}, only the text model is imported: it reads no images")
    stored = WeightFiles(folder, text_only=text is not None) if dcp is None else DcpFolder(dcp)
    in_one = FAMILIES[content["model_type"]].experts_in_one
    experts_in_all = 0 if config.moe is None or in_one else config.experts_layers * config.moe.experts
    least = experts_in_all + (config.n_layer if dcp is None else 0)  # `DcpWeightFiles` says which names it looked for
    if least > len(stored.files):  # before a layer is built, or a tensor is named
        what = f"{config.n_layer:,} layers" + f" and {experts_in_all:,} experts" * bool(experts_in_all)
        raise UserError(f"{folder / CONFIG} has {what}, but the weights are {len(stored.files):,} tensors")
    table = links(content)
    weight_files: WeightFiles | DcpWeightFiles = (
        DcpWeightFiles(stored, [link.theirs for link in table], config) if isinstance(stored, DcpFolder) else stored
    )
    shapes = {name: tensor.shape for name, tensor in weights_on_meta(config).items()}
    assert config.vocab_size is not None
    unread = unread_layers(content, config.n_layer)
    weights = read_weights(weight_files, table, shapes, config.vocab_size, unread)
    if any(name.startswith(unread) for name in weight_files.files):
        notes.append("the layers that predict further tokens are not imported")
    if experts is not None:
        config, weights = upcycled(config, weights, experts)
    assert config.vocab_size is not None
    recipe: dict[str, Any] = {"model": asdict(config)}
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
        recipe["data"] = _tokenizer_in(run)
    else:
        notes.append(
            f"{folder} has no {TOKENIZER_FILE}, so text cannot be tokenized; "
            "create it with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    with new_folder(run, replace=replace, sources=[folder]) as partial:
        if has_tokenizer:
            shutil.copyfile(folder / TOKENIZER_FILE, partial / TOKENIZER_FILE)
            copy_companions(folder, partial, TOKENIZER_COMPANIONS)
        write_json(content, partial / IMPORTED_CONFIG)
        addition = "" if experts is None else f" and made a mixture of {experts} experts"
        title = f"{ARCHITECTURES[content['model_type']]}, imported from {dcp or folder}{addition}"
        _write_run(partial, title, recipe, weights)
    return notes


def _import_dcp(folder: Path, named: str | None, run: Path, *, replace: bool, experts: int | None) -> list[str]:
    """Write the run folder `run` from a folder of torch.distributed.checkpoint (DCP); return notes for the user.

    Args:
        named: the Hugging Face folder with the model's settings. None: the weights are those of a GPT of lit_llm.

    Raises:
        UserError: `run` exists, a folder is missing or unsuitable, or the DCP folder lacks the settings of its model.
    """
    if named is not None:
        return import_folder(Path(named), run, replace=replace, dcp=folder, experts=experts)
    settings = DcpFolder(folder).value("model_config")
    if not isinstance(settings, dict):
        raise UserError(
            f"{folder} is a folder of torch.distributed.checkpoint without the settings of its model: name the Hugging Face "
            "folder that has its config.json and tokenizer (--config_from)"
        )
    config = saved_model_config({"model_config": settings}, folder, "--from")
    if (architecture := saved_architecture({"model_config": settings})) is not None:
        raise UserError(f"{folder} holds {architecture.class_path}, a model of yours: import reads lit_llm's GPT only (--from)")
    weights = own_weights(DcpFolder(folder), config)
    if experts is not None:
        config, weights = upcycled(config, weights, experts)
    with new_folder(run, replace=replace, sources=[folder]) as partial:
        title = f"A model of lit_llm, imported from {folder}"
        _write_run(partial, title, {"model": asdict(config)}, weights)
    return [f"{folder} has no tokenizer: name that of its training (fit --data.tokenizer)"]


def _write_run(partial: Path, title: str, recipe: dict[str, Any], weights: dict[str, Any], **more: Any) -> None:
    """Write config.yaml and the checkpoint of step 0 into the folder `partial`, which already has the tokenizer, if any.

    Args:
        title: a sentence about the model for config.yaml, without its full stop.
        recipe: the settings for config.yaml, as nested dicts.
        weights: {our name: tensor} of a whole model or of adapters.
        more: further entries of the checkpoint.

    Raises:
        UserError: Weights are not finite.
    """
    broken = [name for name, tensor in weights.items() if not _finite(tensor)]
    refuse_first_five(
        [f"{name} has values that are not finite: copy or download the weights again (--from)" for name in broken]
    )
    make_folder(partial / CHECKPOINTS)
    (partial / RUN_CONFIG).write_text(comment(f"{title}. Other settings are defaults.") + dump_yaml(recipe), encoding="utf-8")
    checkpoint: dict[str, Any] = {
        "state_dict": {f"model.{name}": weight for name, weight in weights.items()},
        "model_config": recipe["model"],
        **more,
        "global_step": 0,
        "epoch": 0,
        "pytorch-lightning_version": lightning.__version__,
    }
    if (partial / TOKENIZER_FILE).is_file():
        checkpoint[TOKENIZER_SHA256] = tokenizer_sha256(partial)
    disk_format.write(checkpoint, partial / CHECKPOINTS / STEP_0)
    (partial / CHECKPOINTS / "last.ckpt").symlink_to(STEP_0)


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all values of a tensor are finite, judged by its minimum and maximum: they are found without a copy."""
    values = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no aminmax
    return bool(torch.stack(values.aminmax()).isfinite().all())


def _tokenizer_in(run: Path) -> dict[str, Any]:
    """Return the group `data` of config.yaml as nested dicts: a data module with the tokenizer.json in the folder `run`."""
    tokenizer = {"class_path": "TokenizerJSON", "init_args": {"path": str(run / TOKENIZER_FILE)}}
    return {"class_path": "PythonStdlib", "init_args": {"tokenizer": tokenizer}}


def _import_adapter(folder: Path, named: str | None, run: Path, *, replace: bool) -> None:
    """Write the run folder `run` with the adapter in `folder`, a folder of peft, and the path of its base weights.

    Raises:
        UserError: `named`, the run of the base weights, is None; `run` exists; the adapter does not fit these weights, or has
            a setting that lit_llm's LoRA lacks.
    """
    if named is None:
        raise UserError(f"{folder} is an adapter: name the run folder of its base weights (--init_from)")
    base = InitialWeights.find(Path(named))
    if damage := base.damage():
        raise UserError(damage)
    home = run_of(base.checkpoint)
    content, _ = write_config(base.model, imported_family(home))
    own = weights_on_meta(base.model)
    saved = saved_weights(disk_format.read(base.checkpoint, lazy=True), base.checkpoint)
    if problem := mismatch(own, saved, f"{base.checkpoint} (--init_from)"):
        raise UserError(problem)
    lora, adapters = read_adapter(folder, links(content), {name: tensor.shape for name, tensor in own.items()})
    with new_folder(run, replace=replace, sources=[folder, home]) as partial:
        recipe: dict[str, Any] = {"init_from": str(base.checkpoint), "model": asdict(base.model), "lora": asdict(lora)}
        if base.tokenizer_file is not None:
            shutil.copyfile(base.tokenizer_file, partial / TOKENIZER_FILE)
            recipe["data"] = _tokenizer_in(run)
        copy_companions(home, partial)
        title = f"An adapter, imported from {folder}"
        _write_run(partial, title, recipe, adapters, **{LORA: asdict(lora), BASE: base_record(base.checkpoint)})
    print(f"{run}: an adapter of rank {lora.rank} for {', '.join(lora.targets or [])}, beside the weights of {base.checkpoint}")


def main(arguments: list[str]) -> int:
    """Run the command `import` with its arguments, print what was imported and the next commands, and return the exit code."""
    options = own_flags().parse(arguments)
    folder, run, replace = Path(options.folder), Path(options.out), options.replace
    RunLock(run).refuse_if_held()
    how_to_generate = f"generate:    python -m lit_llm generate --run {run} --prompt TEXT"
    if is_adapter_folder(folder):
        if options.upcycle is not None:
            raise UserError(f"{folder} is an adapter: leave out --upcycle")
        _import_adapter(folder, options.init_from, run, replace=replace)
        print(how_to_generate)
        return 0
    if options.init_from is not None:
        raise UserError(f"{folder} is not an adapter, so it has no base weights: leave out --init_from")
    if is_dcp_folder(folder):
        notes = _import_dcp(folder, options.config_from, run, replace=replace, experts=options.upcycle)
    elif options.config_from is not None:
        raise UserError(f"{folder} is not a folder of torch.distributed.checkpoint: leave out --config_from")
    else:
        notes = import_folder(folder, run, replace=replace, experts=options.upcycle)
    if options.upcycle is not None:
        notes.append(
            "nothing balances the experts yet: train with --model.moe.balance 0.01, or with --expert_balance ExpertBalance"
        )
    saved = disk_format.read(run / CHECKPOINTS / "last.ckpt", verify=False)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in saved["state_dict"].values()})
    buffers = ("router.choice_bias", "router.shares")
    count = sum(tensor.numel() for name, tensor in saved["state_dict"].items() if not name.endswith(buffers))
    print(f"{run}: {count:,} parameters in {', '.join(dtypes)}, context {saved['model_config']['block_size']:,}")
    if not is_dcp_folder(folder):
        stored = WeightFiles(folder, text_only=text_config(read_object(folder / CONFIG)) is not None)
        print(f"read: {stored.values():,} values in {len(stored.files):,} tensors of {folder}")
    for note in notes:
        print(f"note: {note}")
    print(how_to_generate)
    print(f"fine-tune:   python -m lit_llm fit --init_from {run} --config RECIPE --data TextFiles --data.paths my.txt")
    return 0
