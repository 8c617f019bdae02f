"""The LightningModule: training step and validation sums. Everything else is in callbacks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_llm._lightning import trainer_of
from lit_llm._torch import take_unscaled_gradients
from lit_llm.callbacks import Schedule
from lit_llm.checkpoint.compatibility import model_settings
from lit_llm.checkpoint.load_weights import load_weights, mismatch
from lit_llm.data import TokenDataModule
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.parallelize import parallelize
from lit_llm.errors import UserError
from lit_llm.models.custom import Architecture, CustomModel
from lit_llm.models.generation import Sampling, generate, prompt_ids
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import LossConfig, LossSums, chunked_cross_entropy, cross_entropy, cross_entropy_of_logits
from lit_llm.optim import MuonAdamW, parameter_groups
from lit_llm.runs.tokenizer_file import TOKENIZER_SHA256
from lit_llm.training.metrics import BitsPerByte, Perplexity


def keep_configured_options(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A hook for loading an optimizer's state: the configured options apply, not those of the checkpoint. Warns if they differ.

    Except the rate, which the schedule sets.
    """
    groups: list[dict[str, Any]] = []
    changed: dict[str, str] = {}
    for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=False):  # torch refuses another number
        options = {name: value for name, value in own.items() if name not in ("params", "lr") and name in theirs}
        changed |= {name: f"{name} {theirs[name]} -> {value}" for name, value in options.items() if theirs[name] != value}
        groups.append({**theirs, **options})
    if changed:
        rank_zero_warn(
            f"The optimizer's options differ from the checkpoint's. The new ones apply: {', '.join(changed.values())}."
        )
    return {**saved, "param_groups": groups + saved["param_groups"][len(groups) :]}


class LanguageModel(L.LightningModule):
    """Trains a GPT, or a custom architecture, with next-token cross-entropy.

    Every mean is over the tokens of the *global* batch.

    Batches are dicts of `input_ids` and `targets`, both (B, T) int64. Targets of -100 are ignored.

    Logs, at optimizer step 1 and every `trainer.log_every_n_steps`: `train/loss` (nats per token over that step's global
    batch, all ranks and micro-batches) and `train/perplexity`; after validation `val/loss`, `val/perplexity` and, if the
    data module has a tokenizer, `val/bits_per_byte`.

    Args:
        architecture: built instead of a GPT. It uses only block_size, vocab_size and eos_id of `model`.
        init_from: a checkpoint whose weights replace the random initial ones.

    Raises:
        UserError: if the configuration is invalid; the message lists every reason.
    """

    def __init__(
        self,
        model: GPTConfig,
        optimizer: OptimizerCallable = MuonAdamW,
        loss: LossConfig | None = None,
        compute: ComputeConfig | None = None,
        init_from: Path | None = None,
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__()
        loss, compute = loss or LossConfig(), compute or ComputeConfig()
        problems = model.problems() + loss.problems() + compute.problems()
        if architecture is not None:
            problems += architecture.problems(model, loss.chunk_size, compute)
        if problems:
            raise UserError("\n".join(problems))
        self.config = model
        self.architecture = architecture
        self.compute_config = compute
        self.init_from = init_from
        self.optimizer_factory = optimizer
        self.loss_config = loss
        self.loss_function: Callable[..., LossSums] = partial(
            cross_entropy if architecture is None else cross_entropy_of_logits, z_loss=loss.z_loss
        )
        if loss.chunk_size is not None:
            self.loss_function = partial(chunked_cross_entropy, z_loss=loss.z_loss, chunk_size=loss.chunk_size)
        self.model: GPT | CustomModel | None = None  # built in configure_model, when vocabulary and strategy are known
        self.perplexity = Perplexity()
        self.bits_per_byte = BitsPerByte()
        self.token_bytes: Tensor | None = None
        self.tokenizer: Any = None
        self._tokenizer_sha256: str | None = None  # of its file in the run folder
        # Sums over the current optimizer step's micro-batches, on the device. Not saved: checkpoints are made between steps.
        self.window_nll: Tensor | float = 0.0
        self.last_nll: Tensor | float = 0.0  # of this rank's part of the last step, also if that was not logged
        self.window_count: Tensor | int = 0

    # -- building ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        torch.set_float32_matmul_precision(self.compute_config.matmul_precision)  # a setting of the process

    def configure_model(self) -> None:
        """Build the model when the data is known. Lightning may call this more than once.

        `config` becomes a copy with the data's vocabulary; the caller's `GPTConfig` does not change.

        Raises:
            UserError: if the model does not fit the data's tokenizer.
        """
        if self.model is not None:
            return
        trainer = trainer_of(self)
        data = getattr(trainer, "datamodule", None)
        self.tokenizer = getattr(data, "tokenizer", None)
        self.token_bytes = getattr(data, "token_bytes", None)
        data_vocab_size = getattr(data, "vocab_size", None)
        config = replace(self.config)
        if config.vocab_size is None:
            config.vocab_size = data_vocab_size
        elif data_vocab_size is not None and data_vocab_size > config.vocab_size:
            raise UserError(
                f"The data's tokenizer has {data_vocab_size} ids, but model.vocab_size is {config.vocab_size}. "
                "Remove --model.vocab_size to use the data's."
            )
        if config.eos_id is None:
            config.eos_id = getattr(data, "eos_id", None)
        if config.mask_documents and config.eos_id is None:
            raise UserError(
                "model.mask_documents needs an end-of-document id, but the data's tokenizer has none. "
                "Set --model.eos_id, or --model.mask_documents false."
            )
        self.config = config
        strategy = None if trainer is None else trainer.strategy
        mesh = strategy if isinstance(strategy, MeshStrategy) else None
        device = torch.device("cpu") if strategy is None else strategy.root_device
        model: GPT | CustomModel
        if self.architecture is not None:
            # Not on the meta device, because a custom class may not support it.
            model = CustomModel(config, self.architecture)
            parallelize(model, self.compute_config, device, mesh)
        else:
            # Shard on the meta device, so that each rank allocates only its part.
            with torch.device("meta"):
                model = GPT(config)
            parallelize(model, self.compute_config, device, mesh)
            model.to_empty(device="cpu" if mesh is None else mesh.parameter_device)
            model.init_weights()
        if self.init_from is not None:
            load_weights(model, self.init_from)
        self.model = model

    def configure_optimizers(self) -> Optimizer:
        assert self.model is not None
        optimizer = self.optimizer_factory(parameter_groups(self.model))
        optimizer.register_load_state_dict_pre_hook(keep_configured_options)
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            # A fused optimizer would unscale fp16 gradients itself, after gradient clipping and the spike guard.
            take_unscaled_gradients(optimizer)
        return optimizer

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token, see `GPTConfig.flops_per_token`. None for a custom architecture."""
        return self.config.flops_per_token() if self.architecture is None else None

    def on_fit_start(self) -> None:
        self._configured_rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]

    def on_train_start(self) -> None:
        """Without a schedule, apply the configured rates again: a checkpoint has restored its own."""
        if not any(isinstance(callback, Schedule) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            for group, rate in zip(self.trainer.optimizers[0].param_groups, self._configured_rates, strict=True):
                group["lr"] = rate

    # -- training ---------------------------------------------------------------------------------------------------

    @property
    def every_target_counts(self) -> bool:
        """Whether the data module declares that no training target is ignored, so that micro-batches have equal weight."""
        return getattr(getattr(self.trainer, "datamodule", None), "every_target_counts", False)

    def sums(self, batch: dict[str, Tensor]) -> LossSums:
        assert self.model is not None
        sums = self.model(batch["input_ids"], batch["targets"], loss=self.loss_function)
        assert isinstance(sums, LossSums)
        return sums

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        sums = self.sums(batch)
        self.window_nll = self.window_nll + sums.nll
        self.window_count = self.window_count + sums.count
        return sums.loss / self._divisor(batch["targets"])

    def _divisor(self, targets: Tensor) -> int:
        # With ignored targets the token count of the global batch is only known after its last micro-batch. Each micro-batch
        # divides by one constant, the same on all ranks, and `optimizer_step` rescales by the exact count.
        return targets.numel() if self.every_target_counts else self.config.block_size

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Scale the gradient to the mean over all counted tokens, before callbacks read or clip it."""

        def closure() -> Any:
            assert optimizer_closure is not None
            result = optimizer_closure()
            if not self.every_target_counts:
                self._divide_gradients_by_token_count()
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def _divide_gradients_by_token_count(self) -> None:
        # Lightning has divided the gradient by the number of micro-batches, and the strategy by the number of ranks.
        count = torch.as_tensor(
            self.window_count, device=self.trainer.strategy.root_device
        ).clone()  # some strategies reduce in place
        count = self.trainer.strategy.reduce(count, reduce_op="sum")
        assert isinstance(count, Tensor)
        parts = self.config.block_size * self.trainer.accumulate_grad_batches * self.trainer.world_size
        scale = parts / count.clamp(min=1)  # a batch without any target has zero gradients, not NaN
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(scale.to(p.grad.device, p.grad.dtype))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        step = self.trainer.global_step + 1
        nll, count = self.window_nll, self.window_count
        self.window_nll, self.window_count = 0.0, 0
        self.last_nll = nll
        if step != 1 and step % self.trainer.log_every_n_steps:  # type: ignore[attr-defined]  # set by a connector
            return
        packed = torch.stack((torch.as_tensor(nll).double(), torch.as_tensor(count).double()))  # (2,)
        packed = self.trainer.strategy.reduce(packed, reduce_op="sum")
        nll_sum, tokens = packed.tolist()  # the only read of the loss on the host, on logged steps
        loss = nll_sum / tokens if tokens else math.nan
        self.log_row({"train/loss": loss, "train/perplexity": safe_exp(loss)}, step)

    def log_row(self, row: dict[str, float], step: int) -> None:
        """Write a row to every logger at an optimizer step, and to `trainer.callback_metrics`."""
        # Not self.log: it costs 0.5 ms per value, and its step is one behind in training and inconsistent in validation.
        for logger in self.trainer.loggers:
            logger.log_metrics(row, step=step)
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in row.items()})

    # -- validation and test ----------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._start_evaluation("val")

    def on_test_epoch_start(self) -> None:
        self._start_evaluation("test")

    def _start_evaluation(self, split: str) -> None:
        self.perplexity.reset()
        self.bits_per_byte.reset()
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, TokenDataModule):
            self.token_bytes = data.token_bytes_of(split)
        if self.token_bytes is not None:
            device = self.trainer.strategy.root_device
            coarse = device.type == "mps" and self.token_bytes.is_floating_point()  # it has no float64
            self.token_bytes = self.token_bytes.to(device, torch.float32 if coarse else self.token_bytes.dtype)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        sums = self.sums(batch)
        self.perplexity.update(sums.nll, sums.count)
        if self.token_bytes is not None:
            targets = batch["targets"]
            counted = targets >= 0  # (B, T)
            self.bits_per_byte.update(sums.nll, (self.token_bytes[targets.clamp(min=0)] * counted).sum())

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        perplexity = float(self.perplexity.compute())  # sums over all ranks; one exp at the end
        row = {f"{prefix}/loss": math.log(perplexity), f"{prefix}/perplexity": perplexity}
        if self.token_bytes is not None:
            row[f"{prefix}/bits_per_byte"] = float(self.bits_per_byte.compute())
        # log_dict fills callback_metrics (EarlyStopping, checkpoints) and the result of `trainer.validate`. While fitting,
        # Lightning would log one step early, so `log_row` logs instead.
        fitting = self.trainer.state.fn == "fit"
        self.log_dict(row, logger=not fitting)
        if fitting and not self.trainer.sanity_checking:
            self.log_row(row, self.trainer.global_step)

    # -- generation and checkpoints ---------------------------------------------------------------------------------

    def generate_text(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        temperature: float = 0.8,
        top_k: int | None = 50,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """The prompt and its continuation. Sampling has its own random generator, so it does not affect training.

        Raises:
            UserError: if the data has no tokenizer, or a sampling setting is out of range.
        """
        assert self.model is not None
        if self.tokenizer is None:
            raise UserError("Generating text needs a tokenizer: set --data.tokenizer.")
        ids = generate(
            self.model,
            prompt_ids(self.tokenizer, prompt),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            stop_id=self.tokenizer.eos_id,
        )
        return prompt + self.tokenizer.decode(list(ids))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the weights fit a custom architecture: its code may have changed since the checkpoint."""
        if self.architecture is not None:
            problem = mismatch(self.state_dict(), checkpoint["state_dict"], f"the checkpoint of {self.architecture.class_path}")
            if problem is not None:
                raise UserError(problem)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["model_config"] = model_settings(self.config, self.architecture)  # plain values: loading stays weights_only
        checkpoint["optimizer_class"] = class_name(self.trainer.optimizers[0])
        if self.tokenizer is not None:
            if self._tokenizer_sha256 is None:  # of a large vocabulary this takes time
                self._tokenizer_sha256 = hashlib.sha256("".join(self.tokenizer.files().values()).encode()).hexdigest()
            checkpoint[TOKENIZER_SHA256] = self._tokenizer_sha256
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "consumed_samples"):
            checkpoint["tokens"] = data.consumed_samples * data.block_size  # for the manifest
        for logger in self.trainer.loggers:
            logger.save()  # rows of steps in a checkpoint must survive a kill: a resumed run does not write them again


def class_name(thing: object) -> str:
    """The class path of an object."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def safe_exp(loss: float) -> float:
    """exp, infinity on overflow."""
    return math.exp(loss) if loss < 700 else math.inf
