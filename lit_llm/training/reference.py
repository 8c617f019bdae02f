"""The reference of preference losses: log-probabilities of the documents under the weights at the start of training.

With LoRA, the base weights are the reference: each batch gets a forward pass without adapters. Without LoRA, the values are
computed once, before the first step, and stored beside the shards, so that no second model is in memory. The file is
``reference-KEY.bin``. KEY is the start of a hash of weights, model settings, tokens with their masks, tokenizer, template and
precision. The file has this hash (32 bytes), then for each pair its position and the log-probabilities of its chosen and its
rejected document (int64, two float64), then a hash of all these bytes (16 bytes).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_llm.checkpoint.adapters import base_sha256
from lit_llm.core.disk import complete_file
from lit_llm.core.errors import UserError, noting, refuse
from lit_llm.models.lora import Adapted
from lit_llm.training.accumulation import wide

_RECORD = np.dtype([("position", "<i8"), ("logp", "<f8", 2)])
_HASH_BYTES = 16


class Reference:
    """Adds "reference", (B, D), to batches of pairs: log-probabilities of documents under the weights at the start of training.

    Args:
        weights: a text that identifies these weights. None: `prepare` sets it when training starts.
        used: whether the objective compares with a reference. If not, batches are not changed.
    """

    def __init__(self, weights: str | None = None, *, used: bool = True) -> None:
        self.weights, self.used = weights, used
        self._positions = self._values = torch.empty(0)  # (n,) int64, (n, 2)

    def is_stored(self, module: Any) -> bool:
        """Whether this run stores log-probabilities beside the shards. With LoRA, they are computed for each batch."""
        return self.used and module.lora is None

    def prepare(self, module: Any) -> None:
        """Read the stored log-probabilities of all pairs, or compute and store them if training starts at step 0. A collective.

        Raises:
            UserError: the file with the log-probabilities is damaged, gone, or cannot be written.
        """
        if not self.is_stored(module) or len(self._positions):
            return
        strategy, problems = module.trainer.strategy, list[str]()
        records, path, starts = None, Path(), self.weights is None
        if strategy.is_global_zero:
            with noting(problems):
                if starts:
                    self.weights = _of_start(module)
                key = self._key(module)
                path = Path(module.data.corpus.streams["train"].folder_of_manifest) / f"reference-{key[:16]}.bin"
                records = _read(path)
                refuse(module.data.opened.files.problems() if records is None else [])
                if records is None and not starts:
                    raise UserError(
                        f"{path} is gone, the log-probabilities of the weights that the run started from: restore it, or start "
                        "again from them (--init_from)."
                    )
        self.weights, records, problems = strategy.broadcast((self.weights, records, problems))
        refuse(problems)
        if records is None:
            records = self._compute(module)
            if strategy.is_global_zero:
                with noting(problems):
                    _write(path, key, records)
            refuse(strategy.broadcast(problems))
        device = strategy.root_device
        self._positions = torch.from_numpy(records["position"].copy()).to(device)
        self._values = torch.from_numpy(records["logp"].copy()).to(device, wide(device))

    def added_to(self, batch: dict[str, Tensor], module: Any) -> dict[str, Tensor]:
        """A copy of `batch` with "reference"; `batch` itself if the objective uses none. Pairs that are not stored get NaN."""
        if not self.used:
            return batch
        if module.lora is not None:
            with _as_at_start(module):
                logp = module.sums_of(batch).documents  # (B, D)
            return batch if logp is None else {**batch, "reference": logp}  # None: another stage has the loss
        pairs = batch["pairs"]  # (B, P)
        at = torch.searchsorted(self._positions, pairs).clamp(max=len(self._positions) - 1)
        is_stored = self._positions[at] == pairs
        values = torch.where(is_stored[..., None], self._values[at], torch.nan)  # (B, P, 2)
        return {**batch, "reference": torch.where((pairs < 0)[..., None], 0, values).flatten(1)}

    def _key(self, module: Any) -> str:
        data, form = module.data, module.data.chat_form
        tokenizer = data.tokenizer and data.tokenizer.identity()
        precision = str(module.trainer.precision_plugin.precision)
        content = [self.weights, data.opened.fingerprint(), tokenizer, form and form.template, precision]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _compute(self, module: Any) -> np.ndarray:
        """Compute the log-probabilities of both documents of all n pairs. Returns records (n,), each the position of a pair and
        its two log-probabilities. A collective: ranks share the work."""
        strategy = module.trainer.strategy
        device, positions = strategy.root_device, module.data.corpus.pair_positions()
        if strategy.is_global_zero:
            print(f"reference: log-probabilities of {len(positions):,} pairs under the weights that training starts from")
        places = torch.from_numpy(positions).to(device)
        sums = torch.zeros(len(positions), 3, dtype=wide(device), device=device)  # chosen, rejected, ranks that have them
        with module.trainer.precision_plugin.val_step_context(), _as_at_start(module):
            for loader in map(module.data.held_out_loader, module.data.corpus.streams):
                for batch in loader:
                    batch = strategy.batch_to_device(batch)
                    if (logp := module.sums_of(batch).documents) is None:  # in a pipeline, one stage has the loss
                        continue
                    there = batch["pairs"] >= 0  # (B, P)
                    values = logp.unflatten(1, (-1, 2))[there]  # (pairs of the batch, 2)
                    at = torch.searchsorted(places, batch["pairs"][there])
                    sums[at] = torch.cat((values, torch.ones_like(values[:, :1])), dim=1)
        reduced = strategy.reduce(sums, reduce_op="sum")  # several ranks may have the same pair
        assert isinstance(reduced, Tensor)
        records = np.empty(len(positions), dtype=_RECORD)
        records["position"] = positions
        records["logp"] = (reduced[:, :2] / reduced[:, 2:]).cpu().numpy()
        return records


def _of_start(module: Any) -> str:
    """A text, made of hashes, that identifies the weights at the start of training and the settings of the model."""
    if module.init_from is None:
        raise UserError("Preferences need the model that training starts from: name its run (--init_from RUN).")
    model = asdict(module.config)
    if module.config.rope_scaling is None and module.config.layers is None:
        del model["block_size"]  # log-probabilities do not depend on the length of blocks
    settings = json.dumps([model, module.architecture and asdict(module.architecture)], default=str)
    average = " ema" if module.use_ema else ""
    return f"{base_sha256(module.init_from)}{average} {hashlib.sha256(settings.encode()).hexdigest()}"


@contextmanager
def _as_at_start(module: Any) -> Iterator[None]:
    """Context manager in which the model runs without adapters, dropout and gradients."""
    assert module.model is not None
    model: nn.Module = module.model
    layers = [layer for layer in model.modules() if isinstance(layer, Adapted)]
    scales, training = [layer.scale for layer in layers], model.training
    try:
        for layer in layers:
            layer.scale = 0.0
        model.eval()
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for layer, scale in zip(layers, scales, strict=True):
            layer.scale = scale


def _read(path: Path) -> Any:
    """The records in the file `path`, (n,), each the position of a pair and two log-probabilities; None without the file.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """
    try:
        content = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if content is None:
        return None
    body = content[:-_HASH_BYTES]
    if hashlib.blake2b(body, digest_size=_HASH_BYTES).digest() != content[-_HASH_BYTES:]:
        raise UserError(f"{path} is damaged: restore it, or delete it, and a new run makes it again.")
    return np.frombuffer(body[32:], dtype=_RECORD)


def _write(path: Path, key: str, records: np.ndarray) -> None:
    body = bytes.fromhex(key) + records.tobytes()
    try:
        with complete_file(path, path.with_name(f".{path.name}.partial")) as file:
            file.write(body + hashlib.blake2b(body, digest_size=_HASH_BYTES).digest())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Make its folder writable.") from error
