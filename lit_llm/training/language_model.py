"""The LightningModule: training step and validation sums. Everything else is in callbacks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_llm.callbacks import Schedule
from lit_llm.callbacks.gradient_norm_and_clipping import scale_
from lit_llm.checkpoint.adapters import BASE, LORA, base_record
from lit_llm.checkpoint.average import averaged
from lit_llm.checkpoint.compatibility import model_settings
from lit_llm.checkpoint.load_weights import load_weights, mismatch
from lit_llm.core._lightning import trainer_of
from lit_llm.core._torch import seconds_of_compilation, take_unscaled_gradients
from lit_llm.core.errors import UserError
from lit_llm.data import TokenDataModule
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.parallelize import parallelize
from lit_llm.distributed.pipeline_parallel import PipelinedGPT
from lit_llm.models.custom import Architecture, CustomModel
from lit_llm.models.dropout import new_seed
from lit_llm.models.generation import Sampling, generate, prompt_ids
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.lora import LoRAConfig, apply_lora, flops_saved, is_adapter, reset_adapters
from lit_llm.models.loss import LossConfig, LossSums, chunked_cross_entropy, cross_entropy, cross_entropy_of_logits
from lit_llm.optim import MuonAdamW, optimizer_of
from lit_llm.optim.stage_optimizer import optimizer_of_stage
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.custom_config import custom_config
from lit_llm.runs.prompt_start import PROMPT_START
from lit_llm.runs.tokenizer_file import TOKENIZER_SHA256
from lit_llm.training.metrics import BitsPerByte, MeanLoss
from lit_llm.training.repeated_rows import without_repeats
from lit_llm.training.source_losses import SourceLosses


def keep_configured_options(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A hook for loading an optimizer's state: the configured options apply, not those of the checkpoint. Warns if they differ.

    Except the rate, which the schedule sets.
    """
    groups: list[dict[str, Any]] = []
    changed: dict[str, str] = {}
    for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=False):  # torch refuses another number
        options = {name: value for name, value in own.items() if name not in ("params", "lr")}
        changed |= {
            name: f"{name} {theirs[name]} -> {value}"
            for name, value in options.items()
            if name in theirs and theirs[name] != value  # an older version may not have had the option
        }
        groups.append({**theirs, **options})
    if changed:
        rank_zero_warn(
            f"The optimizer's options differ from the checkpoint's. The new ones apply: {', '.join(changed.values())}."
        )
    return {**saved, "param_groups": groups + saved["param_groups"][len(groups) :]}


class LanguageModel(L.LightningModule):
    """Trains a GPT, or a custom architecture, with next-token cross-entropy.

    Every mean is over the tokens of the *global* batch.

    Batches are dicts of `input_ids` and `targets`, both (B, T) int64. Targets of -100 are ignored. With `sources`, (B,) int64,
    rows have the sources that the data module's `source_names` lists. `documents` are those of `GPT.forward`.

    Logs, at optimizer step 1 and every `trainer.log_every_n_steps`: `train/loss` (nats per token over that step's global
    batch, all ranks and micro-batches) and `train/perplexity`; after validation `val/loss`, `val/perplexity` and, if the
    data module has a tokenizer, `val/bits_per_byte`. With sources also `train/SOURCE/loss` and `val/SOURCE/loss`. A step, or
    a source in a step, without a counted target has no loss, and no such row.

    Says the loss of the step to callbacks (`lit_llm.callbacks.step_loss`): the nats, without z-loss.

    Args:
        architecture: built instead of a GPT. It uses only block_size, vocab_size and eos_id of `model`.
        init_from: a checkpoint whose weights replace the random initial ones.
        use_ema: of `init_from`, and of a checkpoint that is evaluated, take the average of the weights that EMA kept.
        lora: train adapters beside the weights of `init_from`, which are frozen. Checkpoints hold the adapters only.

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
        lora: LoRAConfig | None = None,
        use_ema: bool = False,
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
        self.use_ema = use_ema
        self.lora = lora
        self.strict_loading = lora is None  # checkpoints of adapters lack the base; `on_load_checkpoint` compares the names
        self._base: dict[str, str] | None = None  # what checkpoints remember about the base weights
        self.optimizer_factory = optimizer
        self.loss_config = loss
        self.loss_function: Callable[..., LossSums] = partial(
            cross_entropy if architecture is None else cross_entropy_of_logits, z_loss=loss.z_loss
        )
        if loss.chunk_size is not None:
            self.loss_function = partial(chunked_cross_entropy, z_loss=loss.z_loss, chunk_size=loss.chunk_size)
        # Built in configure_model, when vocabulary and strategy are known.
        self.model: GPT | CustomModel | PipelinedGPT | None = None
        self.mean_loss = MeanLoss()
        self.bits_per_byte = BitsPerByte()
        self.token_bytes: Tensor | None = None
        self.tokenizer: Any = None
        self._tokenizer_sha256: str | None = None  # of its file in the run folder
        # Sums over the current optimizer step's micro-batches, on the device. Not saved: checkpoints are made between steps.
        self.window_nll: Tensor | float = 0.0
        self.window_count: Tensor | int = 0
        self.validated_step: int | None = None  # the last one, in `fit`
        self.window_size = 0  # micro-batches
        self.window_sources = SourceLosses(())
        self.window_batches: list[dict[str, Tensor]] = []  # of a pipeline: the step's micro-batches until the last one
        self.window_is_complete = False
        self.micro_batch_count: Tensor | int = 0  # of the latest micro-batch
        self.step_sums = torch.zeros(2)  # of the latest step and all ranks: NLL, counted targets, then those of each source
        self.step_loss, self.step_count = torch.tensor(math.nan), torch.tensor(0)
        self.evaluated_sources = SourceLosses(())

    # -- building ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        torch.set_float32_matmul_precision(self.compute_config.matmul_precision)  # a setting of the process
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, TokenDataModule):
            data.gives_documents = self.config.mask_documents

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
        elif data_vocab_size is not None and config.vocab_size > 2 * data_vocab_size + 256:  # beyond any padding
            rank_zero_warn(
                f"The model has {config.vocab_size:,} embeddings, but the data's tokenizer only {data_vocab_size:,} ids. The "
                "others cost memory and time, and are never used. A run from random weights needs only the data's: "
                "--model.vocab_size null."
            )
        if config.eos_id is None:
            config.eos_id = getattr(data, "eos_id", None)
        if config.mask_documents and config.eos_id is None and not getattr(data, "knows_documents", False):
            raise UserError(
                "model.mask_documents needs to know where documents end, but the shards do not say it, and the data's "
                "tokenizer has no end-of-document id. Prepare the data again, set --model.eos_id, or set "
                "--model.mask_documents false."
            )
        self.config = config
        strategy = None if trainer is None else trainer.strategy
        mesh = strategy if isinstance(strategy, MeshStrategy) else None
        device = torch.device("cpu") if strategy is None else strategy.root_device
        model: GPT | CustomModel | PipelinedGPT
        if self.lora is not None:
            if strategy is not None:
                self.init_from = strategy.broadcast(self.init_from)  # of a resumed run, only rank 0 has looked for it
            if self.init_from is None:
                raise UserError("lora trains adapters beside frozen weights: name the run that has them (--init_from)")
            self._base = base_record(self.init_from)
        if self.architecture is not None:
            # Not on the meta device, because a custom class may not support it.
            model = CustomModel(config, self.architecture)
            model = parallelize(model, self.compute_config, device, mesh)
        else:
            # Shard on the meta device, so that each rank allocates only its part.
            with torch.device("meta"):
                model = GPT(config)
            if self.lora is not None:
                apply_lora(model, self.lora)
            model = parallelize(model, self.compute_config, device, mesh)
            model.to_empty(device="cpu" if mesh is None else mesh.parameter_device)
            model.init_weights()
            if not isinstance(model, PipelinedGPT):  # has drawn adapters of all stages
                reset_adapters(model)
        if self.init_from is not None:
            load_weights(model.whole if isinstance(model, PipelinedGPT) else model, self.init_from, average=self.use_ema)
        self.model = model
        if isinstance(model, PipelinedGPT):
            assert mesh is not None
            mesh.whole_weights = self.whole_state_dict()

    @property
    def whole_model(self) -> GPT | CustomModel:
        """The model. Of a pipeline all of it; layers of other ranks are on the meta device."""
        assert self.model is not None
        return self.model.whole if isinstance(self.model, PipelinedGPT) else self.model

    def configure_optimizers(self) -> Optimizer:
        assert self.model is not None
        if isinstance(self.model, PipelinedGPT):
            optimizer, groups = optimizer_of_stage(self.optimizer_factory, self.model.whole)
            strategy = self.trainer.strategy
            assert isinstance(strategy, MeshStrategy)
            strategy.whole_groups = [[f"model.{name}" for name in group] for group in groups]
        else:
            optimizer = optimizer_of(self.model, self.optimizer_factory)
        optimizer.register_load_state_dict_pre_hook(keep_configured_options)
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            # A fused optimizer would unscale fp16 gradients itself, after gradient clipping and the spike guard.
            take_unscaled_gradients(optimizer)
        return optimizer

    def whole_state_dict(self) -> dict[str, Tensor]:
        """`state_dict` as one process has it. Of a pipeline, on the meta device."""
        if not isinstance(self.model, PipelinedGPT):
            return self.state_dict()
        state = self.model.whole.state_dict(prefix="model.")
        return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token of the data's sequences, see `GPTConfig.flops_per_token` and `flops_saved`.

        Of a custom architecture, those of its kernels, or six per parameter (`lit_llm.plan.custom_trace`).
        """
        length = getattr(getattr(self.trainer, "datamodule", None), "block_size", None)
        if self.architecture is not None:
            return flops_per_token(custom_config(self.config, self.architecture), length=length).total
        model = self.whole_model
        assert isinstance(model, GPT)
        return self.config.flops_per_token(length) - flops_saved(model)

    def on_fit_start(self) -> None:
        # An interrupted fit may have left a part of a step.
        self.window_batches, self.window_nll, self.window_count, self.window_size = [], 0.0, 0, 0
        self.window_sources = SourceLosses(self._source_names())
        self._configured_rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self._first_batch = True

    def on_train_start(self) -> None:
        """Without a schedule, apply the configured rates again: a checkpoint has restored its own."""
        if not any(isinstance(callback, Schedule) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            for group, rate in zip(self.trainer.optimizers[0].param_groups, self._configured_rates, strict=True):
                group["lr"] = rate

    # -- training ---------------------------------------------------------------------------------------------------

    @property
    def every_target_counts(self) -> bool:
        """Whether micro-batches have equal weight on all ranks: the data module declares that no training target is ignored."""
        declared = getattr(getattr(self.trainer, "datamodule", None), "every_target_counts", False)
        return declared and self._mesh("context", 1) == 1  # ranks that share a sequence may have padding of it

    @property
    def holds_all_logits(self) -> bool:
        """Whether training has the logits of a whole micro-batch in memory. `HealthSignals` reads it."""
        return self.loss_config.chunk_size is None

    def sums(self, batch: dict[str, Tensor]) -> LossSums:
        assert self.model is not None
        documents = {"documents": batch["documents"]} if "documents" in batch else {}  # a custom model takes none
        sums = self.model(batch["input_ids"], batch["targets"], loss=self._loss_function(batch), **documents)
        assert isinstance(sums, LossSums)
        return sums

    def _loss_function(self, batch: dict[str, Tensor]) -> Callable[..., LossSums]:
        return partial(self.loss_function, by_row=True) if "sources" in batch else self.loss_function

    def _source_names(self) -> list[str]:
        return getattr(getattr(self.trainer, "datamodule", None), "source_names", [])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss over the counted targets of a micro-batch on this rank; 0 without any, and in a pipeline."""
        self.window_size += 1
        if isinstance(self.model, PipelinedGPT):  # computes all micro-batches of a step at once, in `backward`
            # Drawn now, as on one process: `StepSeed` seeds the generator for each micro-batch.
            self.window_batches.append({**batch, "seed": new_seed()} if self.model.whole.drops else batch)
            return torch.zeros((), device=batch["targets"].device)
        sums = self.sums(batch)
        self._count(batch, sums)
        self.micro_batch_count = sums.count
        return mean_of(sums)

    def _count(self, batch: dict[str, Tensor], sums: LossSums) -> None:
        if "sources" in batch:
            self.window_sources.add(batch["sources"], sums)
        self.window_nll = self.window_nll + sums.nll
        self.window_count = self.window_count + sums.count

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a mean, by weight. A pipeline's last micro-batch of a step runs all of them, by the schedule.

        Not in `training_step`, because Lightning sets gradients to zero after it.
        """
        if not isinstance(self.model, PipelinedGPT):
            super().backward(loss * self._weight(self.micro_batch_count), *args, **kwargs)
            return
        if not self.window_is_complete:
            return
        window, self.window_batches = self.window_batches, []

        def objective(sums: LossSums, batch: dict[str, Tensor]) -> Tensor:
            return mean_of(sums) * self._weight(sums.count) / self.trainer.accumulate_grad_batches  # as Lightning divides

        found = self.model.train_step(
            window,
            loss=self._loss_function,
            objective=objective,
            forward_context=self.trainer.precision_plugin.train_step_context,
        )
        for batch, sums in zip(window, found, strict=False):  # nothing is found without the last stage
            self._count(batch, sums)

    def _weight(self, count: Tensor | int) -> Tensor | float:
        # With ignored targets the token count of the global batch is only known after its last micro-batch. Each mean is
        # weighted by its count over a constant, the same on all ranks, and `_end_window` rescales by the exact count. Ranks
        # that share each sequence have parts of it, and the strategy averages the gradients over these ranks, too.
        return 1.0 if self.every_target_counts else count / self.config.block_size

    def first_gradient_scale(self) -> Tensor | float:
        """After the first micro-batch of a step: what makes its gradient that of the mean over its targets; inf without any."""
        return self.trainer.accumulate_grad_batches / self._weight(self.window_count)

    def _mesh(self, name: str, otherwise: int) -> int:
        """A number of ranks of the MeshStrategy; `otherwise` with another strategy, or without a Trainer."""
        trainer = trainer_of(self)
        strategy = None if trainer is None else trainer.strategy
        return getattr(strategy, name) if isinstance(strategy, MeshStrategy) else otherwise

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Sum the loss, and scale the gradient to the mean over all counted tokens, before callbacks read or clip it."""

        def closure() -> Any:
            assert optimizer_closure is not None
            self.window_is_complete = True  # the closures of earlier micro-batches do not come through here
            try:
                result = optimizer_closure()
            finally:
                self.window_is_complete = False
            self._end_window()
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def _end_window(self) -> None:
        strategy, wanted, made = self.trainer.strategy, self.trainer.accumulate_grad_batches, self.window_size
        # Of a pipeline, ranks without the loss have plain zeros. Copying those to a GPU would wait for it.
        zero = torch.zeros((), dtype=torch.float64, device=strategy.root_device)
        own = torch.stack([value + zero for value in (self.window_nll, self.window_count)])
        sums = torch.cat((own, self.window_sources.take(own.device).to(own.dtype)))  # (2 + 2 S,)
        self.step_sums = strategy.reduce(sums, reduce_op="sum")
        self.step_loss, self.step_count = self.step_sums[0] / self.step_sums[1], self.step_sums[1]
        self.window_nll, self.window_count, self.window_size = 0.0, 0, 0
        # Lightning has divided the gradient by the micro-batches of a whole window, and the strategy by the number of ranks.
        if not self.every_target_counts:
            parts = self.config.block_size * wanted * self._mesh("loss_ranks", self.trainer.world_size)
            scale = parts / self.step_count.clamp(min=1)  # a batch without any target has zero gradients, not NaN
        elif made == wanted:
            return
        else:  # the epoch ends here
            scale = torch.tensor(wanted / made)
        scale_((p.grad for p in self.parameters() if p.grad is not None), scale.float())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print what compilation took, after the first micro-batch. Every launch pays it."""
        if self._first_batch and self.compute_config.compile and self.trainer.is_global_zero:
            seconds = seconds_of_compilation()
            if seconds:  # 0: there is no compiler
                print(f"compile: {seconds:.1f} s for the first micro-batch (--compute.compile)")
        self._first_batch = False

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        step = self.trainer.global_step + 1
        if step != 1 and step % self.trainer.log_every_n_steps:  # type: ignore[attr-defined]  # set by a connector
            return
        nll, tokens, *by_source = self.step_sums.tolist()  # the only read of the loss on the host, on logged steps
        if tokens:
            row = {"train/loss": nll / tokens, "train/perplexity": safe_exp(nll / tokens)}
            self.log_row(row | self.window_sources.losses("train", by_source), step)

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
        self.mean_loss.reset()
        self.bits_per_byte.reset()
        self.evaluated_sources = SourceLosses(self._source_names())
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, TokenDataModule):
            self.token_bytes = data.token_bytes_of(split)
        if self.token_bytes is not None:
            device = self.trainer.strategy.root_device
            coarse = device.type == "mps" and self.token_bytes.is_floating_point()  # it has no float64
            self.token_bytes = self.token_bytes.to(device, torch.float32 if coarse else self.token_bytes.dtype)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if not isinstance(getattr(self.trainer, "datamodule", None), TokenDataModule):  # which repeats nothing
            loader = self.trainer.test_dataloaders if self.trainer.testing else self.trainer.val_dataloaders
            batch = without_repeats(batch, batch_idx, loader[0] if isinstance(loader, list | tuple) else loader)
        # The last batch may be smaller. Computing it without compiled blocks is faster than compiling them for its size.
        with torch.compiler.set_stance("default" if batch_idx == 0 else "eager_on_recompile"):
            sums = self.sums(batch)
        self.mean_loss.update(sums.nll, sums.count)
        if "sources" in batch:
            self.evaluated_sources.add(batch["sources"], sums)
        if self.token_bytes is not None:
            targets = batch["targets"]
            counted = targets >= 0  # (B, T)
            of_batch = (self.token_bytes[targets.clamp(min=0)] * counted).sum()
            self.bits_per_byte.update(sums.nll, of_batch / self._mesh("batch_parts", 1))  # the sums are this rank's part

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        loss = float(self.mean_loss.compute())  # sums over all ranks
        row = {f"{prefix}/loss": loss, f"{prefix}/perplexity": safe_exp(loss)}
        if self.token_bytes is not None:
            row[f"{prefix}/bits_per_byte"] = float(self.bits_per_byte.compute())
        if self.evaluated_sources.names:
            by_source = self.evaluated_sources.take(self.trainer.strategy.root_device)
            by_source = self.trainer.strategy.reduce(by_source, reduce_op="sum")
            assert isinstance(by_source, Tensor)
            row |= self.evaluated_sources.losses(prefix, by_source.tolist())
        # log_dict fills callback_metrics (EarlyStopping, checkpoints) and the result of `trainer.validate`. While fitting,
        # Lightning would log one step early, so `log_row` logs instead.
        fitting = self.trainer.state.fn == "fit"
        self.log_dict(row, logger=not fitting)
        if fitting and not self.trainer.sanity_checking:
            self.log_row(row, self.trainer.global_step)
            self.validated_step = self.trainer.global_step

    # -- generation and checkpoints ---------------------------------------------------------------------------------

    @property
    def prompt_start(self) -> list[int]:
        """The end-of-document id, if documents are masked and each begins with it in training. Empty: BOS, or nothing."""
        data = getattr(trainer_of(self), "datamodule", None)
        # Conversations have no end: each is what its template writes. Without a `TokenDataModule`, GPT finds the ids.
        opens = self.config.mask_documents and getattr(data, "ends_open", True)
        return [self.config.eos_id] if opens and self.config.eos_id is not None else []

    @property
    def context_length(self) -> int:
        """Most tokens of a text that the model reads at once."""
        return self.config.block_size

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, T, V) of ids (B, T), on every rank. Each sequence is one document, as in an exported model."""
        assert self.model is not None
        documents = {"documents": torch.zeros_like(input_ids)} if self.config.mask_documents else {}
        found = self.model(input_ids, **documents)
        assert isinstance(found, Tensor)
        return found

    def greedy_ids(self, ids: list[int], *, max_new_tokens: int) -> Iterator[int]:
        """The likeliest ids after `ids`, one by one, up to the end of the document."""
        assert self.model is not None
        return generate(
            self.model,  # type: ignore[arg-type]  # a pipeline's part gives the logits of the whole
            ids,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=0),
            stop_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
        )

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
            self.model,  # type: ignore[arg-type]  # a pipeline's part gives the logits of the whole
            prompt_ids(self.tokenizer, prompt, prefix=self.prompt_start),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            stop_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
        )
        return prompt + self.tokenizer.decode(list(ids))

    def saved_weights(self, state: dict[str, Any]) -> dict[str, Any]:
        """The tensors of a state dict that checkpoints hold: all, or adapters only."""
        return state if self.lora is None else {name: tensor for name, tensor in state.items() if is_adapter(name)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that adapters, or the weights of a custom architecture, fit: its code may have changed since the checkpoint.

        With `use_ema`, an evaluation loads the average instead of the weights.
        """
        if self.use_ema and self.trainer.state.fn != "fit":
            checkpoint["state_dict"] = averaged(checkpoint, Path(str(self.trainer.ckpt_path)), "--use_ema")
        if self.lora is not None:
            own = self.saved_weights(self.whole_state_dict())
            if problem := mismatch(own, checkpoint["state_dict"], "the checkpoint of adapters (--lora)"):
                raise UserError(problem)
        if self.architecture is not None:
            problem = mismatch(self.state_dict(), checkpoint["state_dict"], f"the checkpoint of {self.architecture.class_path}")
            if problem is not None:
                raise UserError(problem)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self.saved_weights(checkpoint["state_dict"])
        if self.lora is not None:
            checkpoint |= {LORA: asdict(self.lora), BASE: self._base}
        checkpoint["model_config"] = model_settings(self.config, self.architecture)  # plain values: loading stays weights_only
        checkpoint[PROMPT_START] = self.prompt_start
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


def mean_of(sums: LossSums) -> Tensor:
    """The mean loss over the counted targets; 0 without any."""
    return sums.loss / sums.count.clamp(min=1)


def class_name(thing: object) -> str:
    """The class path of an object."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def safe_exp(loss: float) -> float:
    """exp, infinity on overflow."""
    return math.inf if loss >= 700 else math.exp(loss)
