"""The weights of a Hugging Face folder, in one file or several: safetensors, or pickles of plain tensors."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.hf.optional_packages import safetensors
from lit_llm.hf.tensor_map import VOCABULARY, Link

CONFIG = "config.json"
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_NOT_WEIGHTS = re.compile(r"(^|\.)(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)$")
"""Masks and rotary tables that old folders carry."""


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: there is no such file, or it holds no JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object")
    return content


class WeightFiles:
    """Tensors of a folder by name; each is read when it is asked for.

    Raises:
        UserError: the folder has no weights, a shard is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
        if found is None:
            raise UserError(f"{folder} has no weights: none of {', '.join(_FILES)} is there (--from)")
        self._open: dict[Path, Any] = {}
        self.where: dict[str, Path] = {}
        """Name of a tensor → the file that has it."""
        if found.suffix == ".json":
            names = read_json(found).get("weight_map")
            if not isinstance(names, dict):
                raise UserError(f"{found} has no 'weight_map' that says which file has which tensor")
            self.where = {name: folder / file for name, file in names.items()}
            missing = [file for file in dict.fromkeys(self.where.values()) if not file.is_file()]
            if missing:
                raise UserError("\n".join(f"{file} is missing, and {found.name} says it holds weights" for file in missing))
            for name, file in self.where.items():
                if name not in self._names(file):
                    raise UserError(f"{file} has no tensor {name}, and {found.name} says it has")
        else:
            self.where = dict.fromkeys(self._names(found), found)
        self.where = {name: file for name, file in self.where.items() if not _NOT_WEIGHTS.search(name)}

    def _content(self, file: Path) -> Any:
        """A file that is open: mapped where that is possible."""
        if file not in self._open:
            library = safetensors() if file.suffix == ".safetensors" else None
            try:
                if library is not None:
                    self._open[file] = library.safe_open(file, framework="pt")
                else:
                    self._open[file] = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
            except Exception as error:  # neither library has one type for all that can be wrong with a file
                said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
                raise UserError(f"{file} cannot be read, it is damaged or holds more than tensors: {said}") from error
        return self._open[file]

    def _names(self, file: Path) -> list[str]:
        return list(self._content(file).keys())

    def __getitem__(self, name: str) -> Tensor:
        file = self.where[name]
        content = self._content(file)
        tensor: Tensor = content[name] if isinstance(content, dict) else content.get_tensor(name)
        return tensor


def read_weights(folder: Path, table: list[Link], shapes: dict[str, torch.Size], vocab_size: int) -> dict[str, Tensor]:
    """Our state_dict from a folder's weights, each in the folder's own dtype and in memory of its own.

    Args:
        shapes: the shapes of our state_dict; its vocabulary may be padded (P rows), the folder's has `vocab_size` rows.

    Raises:
        UserError: a tensor is missing, of another shape than config.json says, or not of this model; each names its file.
    """
    files = WeightFiles(folder)
    names = {link.theirs: _stored_name(link.theirs, files.where) for link in table}
    problems = [
        f"{folder} has no tensor {theirs}, and {CONFIG} says it has" for theirs, stored in names.items() if stored is None
    ]
    stored_names = {stored for stored in names.values() if stored is not None}
    tied = not any(link.theirs == "lm_head.weight" for link in table)
    for name in sorted(files.where.keys() - stored_names):
        if not (tied and name == "lm_head.weight"):
            problems.append(f"{files.where[name]} has a tensor {name} that the model of {CONFIG} does not have")
    _refuse(problems)
    weights: dict[str, Tensor] = {}
    for link in table:
        stored = names[link.theirs]
        assert stored is not None
        file, tensor = files.where[stored], files[stored]
        parts = [torch.Size((vocab_size, *shapes[name][1:])) if name in VOCABULARY else shapes[name] for name in link.ours]
        whole = [sum(part[0] for part in parts), *parts[0][1:]]
        expected = tuple(reversed(whole)) if link.transposed else tuple(whole)
        if tuple(tensor.shape) != expected:
            problems.append(f"{file}: {stored} is {tuple(tensor.shape)}, and {CONFIG} says {expected}")
            continue
        if not tensor.is_floating_point():
            problems.append(f"{file}: {stored} is {tensor.dtype}, and weights are floating-point numbers")
            continue
        pieces = (tensor.T if link.transposed else tensor).split([part[0] for part in parts])
        for name, piece in zip(link.ours, pieces, strict=True):
            # Copied: the file is mapped, and saving a view of it would save all of it.
            own = piece.clone(memory_format=torch.contiguous_format)
            if name in VOCABULARY:
                own = F.pad(own, (0, 0, 0, shapes[name][0] - vocab_size))
            if name in weights and not torch.equal(own, weights[name]):
                problems.append(
                    f"{file}: {stored} is not equal to its pair, and only such a gate with 'hidden_act' relu is known"
                )
            weights[name] = own
    if tied and "lm_head.weight" in files.where and not problems:
        head = files["lm_head.weight"]
        if not torch.equal(head, weights["embedding.weight"][: len(head)]):
            problems.append(f"{files.where['lm_head.weight']}: lm_head.weight is not the embedding, and {CONFIG} ties the two")
    _refuse(problems)
    return weights


def _refuse(problems: list[str]) -> None:
    """Raise what was found, if anything: the first five, since one wrong size shows in every layer."""
    if problems:
        raise UserError("\n".join(problems[:5] + [f"… and {len(problems) - 5} more"] * (len(problems) > 5)))


def _stored_name(theirs: str, where: dict[str, Path]) -> str | None:
    """The name in the folder: saved from the model without its head, names lack the first part."""
    bare = theirs.split(".", 1)[1]
    return next((name for name in (theirs, bare) if name in where), None)
