"""Reads the weights of a Hugging Face folder: safetensors, or pickles of plain tensors, in one file or several.

If the model of a folder also reads images, only its text model is imported.
"""

from __future__ import annotations

import importlib
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_llm.core.disk import naming, read_object
from lit_llm.core.errors import UserError, library_errors, need
from lit_llm.hf.dcp_weights import DcpWeightFiles
from lit_llm.hf.tensor_map import CHOICE_BIAS, VOCABULARY, Link
from lit_llm.models.router import initial_buffers

CONFIG = "config.json"
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_NOT_WEIGHTS = re.compile(r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
"""Matches names of masks and rotary tables in old folders, which are not weights."""
_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of the output head in all families. Some folders store a tied head in addition to the embedding."""
_GEMMA3_SIZES = {
    **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072},
}
"""Default sizes of Gemma3TextConfig. Published files leave out sizes that equal the default."""
_TEXT_FAMILIES = {"gemma3": ("gemma3_text", _GEMMA3_SIZES)}
"""`model_type` of a model with images → (`model_type` of its text model, defaults for sizes that `text_config` may lack)."""
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Keys at the top level of config.json, outside `text_config`, that the text model needs."""
_TEXT_PREFIX = re.compile(r"^(?:language_model\.(?=model\.|lm_head\.)|(model\.)language_model\.)")


def safetensors() -> Any:
    """Return the module `safetensors`, with its submodule `torch`.

    Raises:
        UserError: safetensors is not installed.
    """
    library = need("safetensors", what="A Hugging Face folder")
    importlib.import_module("safetensors.torch")
    return library


def text_config(content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config.json of the text model in a model that also reads images; None if `content` is of another model."""
    family = content.get("model_type")
    text = content.get("text_config")
    if not isinstance(family, str) or family not in _TEXT_FAMILIES or not isinstance(text, dict):
        return None
    name, defaults = _TEXT_FAMILIES[family]
    shared = {key: content[key] for key in _SHARED_KEYS if key in content}
    return {**defaults, **shared, **text, "model_type": name}


def name_in_text_model(stored: str) -> str | None:
    """Translate `stored`, a tensor's name in the folder of a model that also reads images, to its name in a folder of the text
    model alone; None if the text model lacks the tensor."""
    if stored == "lm_head.weight":
        return stored
    match = _TEXT_PREFIX.match(stored)
    return None if match is None else (match[1] or "") + stored[match.end() :]


class WeightFiles:
    """Reader of the tensors of a Hugging Face folder: `weights[name]` reads and returns a tensor.

    Args:
        text_only: whether, of a model that also reads images, only the tensors of the text model are read, under the names
            that they have in a folder of the text model alone.

    Raises:
        UserError: the folder has no weights, or a shard is missing or damaged.
    """

    def __init__(self, folder: Path, *, text_only: bool = False) -> None:
        main_file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
        if main_file is None:
            raise UserError(f"{folder} has no weights: expected one of {', '.join(_FILES)} (--from).")
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self.files: dict[str, Path] = {}
        """Name of a tensor → the file that has it."""
        if main_file.suffix == ".json":
            names = read_object(main_file).get("weight_map")
            if not isinstance(names, dict):
                raise UserError(f"{main_file} has no 'weight_map', which maps tensors to files")
            self.files = {name: folder / file for name, file in names.items()}
            missing = [file for file in dict.fromkeys(self.files.values()) if not file.is_file()]
            if missing:
                raise UserError("\n".join(f"{file} is missing, but {main_file.name} lists it" for file in missing))
            for name, file in self.files.items():
                if name not in self._names(file):
                    raise UserError(f"{file} has no tensor {name}, but {main_file.name} lists it there")
        else:
            self.files = dict.fromkeys(self._names(main_file), main_file)
        self.files = {name: file for name, file in self.files.items() if not _NOT_WEIGHTS.search(name)}
        self._stored = {name: name for name in self.files}
        if text_only:
            named = {name_in_text_model(name): name for name in self.files}
            self._stored = {name: stored for name, stored in named.items() if name is not None}
            self.files = {name: self.files[stored] for name, stored in self._stored.items()}

    def _content(self, file: Path) -> Any:
        """Return the open safetensors file, or a pickle's {name: tensor}, memory-mapped if possible. Files are opened once."""
        if file not in self._open:
            library = safetensors() if file.suffix == ".safetensors" else None
            with naming(file), library_errors(f"{file} cannot be read. It is damaged or contains more than tensors"):
                if library is not None:
                    self._open[file] = library.safe_open(file, framework="pt")
                else:
                    self._open[file] = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
            content = self._open[file]
            if library is None and not (
                isinstance(content, dict)
                and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
            ):
                raise UserError(f"{file} must hold tensors by their names, and nothing else")
        return self._open[file]

    def _names(self, file: Path) -> list[str]:
        return list(self._content(file).keys())

    def __getitem__(self, name: str) -> Tensor:
        file = self.files[name]
        content, stored = self._content(file), self._stored[name]
        with naming(file), library_errors(f"{file}: {name} cannot be read"):
            tensor: Tensor = content[stored] if isinstance(content, dict) else content.get_tensor(stored)
        return tensor

    def values(self) -> int:
        """Return the number of values in all tensors, without reading these."""
        contents = ((self._content(file), self._stored[name]) for name, file in self.files.items())
        shapes = (each[name].shape if isinstance(each, dict) else each.get_slice(name).get_shape() for each, name in contents)
        return sum(map(math.prod, shapes))


def read_weights(
    source: WeightFiles | DcpWeightFiles,
    table: list[Link],
    shapes: dict[str, torch.Size],
    vocab_size: int,
    unread: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Return our state_dict, read from the weights of a folder, in the folder's dtype.

    A tensor that needs no conversion stays in its memory-mapped file, so that a model larger than memory can be imported. Each
    tensor has a storage of its own, so that saving a tensor saves no other values. The matrices of all experts are copied into
    one tensor in memory.

    Args:
        table: links between the tensors of the folder and ours.
        shapes: {our name: shape}. Embedding and head may have padding; in the folder they have `vocab_size` rows.
        unread: prefixes of the names of tensors that are not imported.

    Raises:
        UserError: a tensor is missing, is not part of the model, or has another shape than config.json implies.
    """
    folder = source.folder
    tied = not any("head.weight" in link.ours for link in table)
    names = {link.theirs: _stored_name(link, source.files, tied) for link in table}
    problems = [
        f"{folder} has no tensor {theirs}, but {CONFIG} implies it" for theirs, stored in names.items() if stored is None
    ]
    stored_names = {stored for stored in names.values() if stored is not None}
    for name in sorted(source.files.keys() - stored_names):
        if not (tied and name in _HEADS) and not name.startswith(unread) and source[name].numel():
            problems.append(f"{source.files[name]} has a tensor {name}, which is not part of the model in {CONFIG}")
    refuse_first_five(problems)
    weights: dict[str, Tensor] = {}
    for link in table:
        stored = names[link.theirs]
        assert stored is not None
        file, tensor = source.files[stored], source[stored]
        parts = [torch.Size((vocab_size, *shapes[name][1:])) if name in VOCABULARY else shapes[name] for name in link.ours]
        if link.expert is not None:
            parts = [part[1:] for part in parts]
        expected = link.shape(parts)
        if tuple(tensor.shape) != expected:
            problems.append(f"{file}: {stored} has shape {tuple(tensor.shape)}, but {CONFIG} implies {expected}")
            continue
        if not tensor.is_floating_point():
            problems.append(f"{file}: {stored} has dtype {tensor.dtype}, but weights must be floating-point")
            continue
        for name, piece in zip(link.ours, link.split(tensor, parts), strict=True):
            if name in VOCABULARY and shapes[name][0] != vocab_size:
                piece = F.pad(piece, (0, 0, 0, shapes[name][0] - vocab_size))
            if name.endswith(CHOICE_BIAS):
                piece = piece.float()  # a router keeps this bias in fp32
            if link.expert is not None:
                if name not in weights:
                    weights[name] = piece.new_empty(shapes[name])
                if piece.dtype != weights[name].dtype:
                    problems.append(f"{file}: {stored} has dtype {piece.dtype}, but other experts have {weights[name].dtype}")
                weights[name][link.expert] = piece
                continue
            piece = _with_own_storage(piece)
            if name in weights and not torch.equal(piece, weights[name]):
                problems.append(f"{file}: {stored} must equal its gate or up matrix, because 'hidden_act' is relu")
            weights[name] = piece
    for name in _HEADS if tied and not problems else ():
        if name in source.files:
            head = source[name]
            if head.dim() != 2 or not torch.equal(head, weights["embedding.weight"][: len(head)]):
                problems.append(f"{source.files[name]}: {name} differs from the embedding, but {CONFIG} ties the two")
    refuse_first_five(problems)
    for name, shape in shapes.items():
        if name not in weights:  # a buffer of a router gets its value before the first step
            weights[name] = initial_buffers(shape[0])[name.rpartition(".")[2]]
    return weights


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values, in a storage without other values. Only scalars and non-contiguous tensors are
    copied."""
    if not tensor.is_contiguous() or tensor.dim() == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    # In torch, a part of a mapped file has the whole file's storage; through NumPy it does not. NumPy lacks bfloat16: bytes.
    return torch.from_numpy(tensor.view(torch.uint8).numpy()).view(tensor.dtype)


def refuse_first_five(problems: list[str], file: Path | None = None) -> None:
    """Raise a UserError with the first five of `problems`, if any: one wrong size may give a problem per layer.

    Args:
        file: a file whose path each sentence shall begin with; None: sentences stay as they are.
    """
    if problems:
        said = problems[:5] if file is None else [f"{file}: {problem}" for problem in problems[:5]]
        raise UserError("\n".join(said + [f"… and {len(problems) - 5} more"] * (len(problems) > 5)))


def _stored_name(link: Link, files: dict[str, Path], tied: bool) -> str | None:
    """Return the name of a link's tensor in a folder; None if it is missing. Some folders omit the first component of names,
    or store a tied embedding under the name of the head."""
    bare, heads = link.theirs.split(".", 1)[1], _HEADS if tied and "embedding.weight" in link.ours else ()
    return next((name for name in (link.theirs, bare, *heads) if name in files), None)
