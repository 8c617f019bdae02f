"""The LightningModule: training step and validation sums. Everything else is in callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer

from lit_llm.callbacks import Schedule
from lit_llm.callbacks._lightning import callback_of, is_logged, write_row
from lit_llm.callbacks.gradient_norm_and_clipping import scale_
from lit_llm.checkpoint.adapters import base_record
from lit_llm.checkpoint.load_weights import load_weights
from lit_llm.core._lightning import trainer_of
from lit_llm.core._torch import seconds_of_compilation, take_unscaled_gradients
from lit_llm.core.errors import UserError, refuse
from lit_llm.data import TokenDataModule
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.distributed.parallelize import parallelize
from lit_llm.distributed.pipeline_parallel import PipelinedGPT
from lit_llm.models.custom import Architecture, CustomModel
from lit_llm.models.gpt import GPT, GPTConfig, LossFunction
from lit_llm.models.lora import LoRAConfig, apply_lora, flops_saved, reset_adapters
from lit_llm.models.loss import LossConfig, LossSums
from lit_llm.models.own_flops import own_flops_per_token
from lit_llm.optim import MuonAdamW, optimizer_of
from lit_llm.optim.transfer import optimizer_of_stage
from lit_llm.training.accumulation import Accumulation, LossMeans, mean_of
from lit_llm.training.compressors import compressors
from lit_llm.training.data_vocabulary import check_batch, with_vocabulary
from lit_llm.training.evaluation import Evaluation, safe_exp, without_repeats
from lit_llm.training.objective import CrossEntropy, Objective
from lit_llm.training.reference import Reference
from lit_llm.training.saved_state import add_entries, check_entries, keep_configured_options
from lit_llm.training.text_generation import TextGeneration


class LanguageModel(TextGeneration):
    """Trains a GPT, or a custom architecture, with next-token cross-entropy or another objective.

    Losses are means over the *global* batch: per token, or per pair for preferences.

    Batches are dicts of `input_ids` and `targets`, both (B, T) int64. Targets of -100 are ignored. Optional: `sources`, (B,)
    int64 indices into the data module's `source_names`, and `documents`, as in `GPT.forward`.

    Logs, at optimizer step 1 and every `trainer.log_every_n_steps`: `train/loss` (nats per token over that step's global
    batch, all ranks and micro-batches) and `train/perplexity`; after validation `val/loss`, `val/perplexity` and, if the
    data module has a tokenizer, `val/bits_per_byte`. With sources also `train/SOURCE/loss` and `val/SOURCE/loss`. With
    `model.predict_ahead` also `train/loss_ahead` (nats per token, over all tokens further ahead; no other loss includes them).
    If no target of a step, or of a source in a step, is counted, this loss is not logged for the step.

    Callbacks read the loss of a step as in `lit_llm.callbacks.contracts.SaysStepLoss`: in nats, without z-loss.

    Args:
        architecture: a custom model instead of a GPT. It uses only block_size, vocab_size and eos_id of `model`.
        init_from: a checkpoint whose weights replace the random initial ones.
        objective: the loss to minimise; None: cross-entropy. It decides what is logged beside, or instead of, the names above.
        use_ema: take EMA's average of the weights from `init_from`, and from a checkpoint that is evaluated.
        lora: train adapters beside the weights of `init_from`, which are frozen. Checkpoints hold the adapters only.

    Raises:
        UserError: if the configuration is invalid; the message lists every reason.
    """

    def __init__(
        self,
        model: GPTConfig,
        optimizer: Callable[[Any], Optimizer] = MuonAdamW,
        loss: LossConfig | None = None,
        compute: ComputeConfig | None = None,
        init_from: Path | None = None,
        architecture: Architecture | None = None,
        lora: LoRAConfig | None = None,
        use_ema: bool = False,
        objective: Objective | None = None,
    ) -> None:
        super().__init__()
        self.objective = objective or CrossEntropy()
        self.reference = Reference() if self.objective.uses_reference else None
        loss, compute = loss or LossConfig(), compute or ComputeConfig()
        problems = model.problems() + loss.problems() + compute.problems()
        if architecture is not None:
            problems += architecture.problems(model, loss.chunk_size, compute)
        refuse(problems)
        self.config = model
        self.architecture = architecture
        self.compute_config = compute
        self.init_from = init_from
        self.use_ema = use_ema
        self.lora = lora
        self.strict_loading = lora is None  # checkpoints of adapters lack the base; `on_load_checkpoint` compares the names
        self.base: dict[str, str] | None = None  # what checkpoints remember about the base weights
        self.optimizer_factory = optimizer
        self.loss_config = loss
        # Built in configure_model, when vocabulary and strategy are known.
        self.model: GPT | CustomModel | PipelinedGPT | None = None
        self.token_bytes: Tensor | None = None
        self.tokenizer: Any = None
        self.tokenizer_sha256: str | None = None  # of the tokenizer's files
        self.window = Accumulation(LossMeans())
        self.evaluation: Evaluation  # of the current validation or test
        self._compressors: dict[str, dict[str, float]] = {}  # split → bits per byte of gzip and xz
        self.validated_step: int | None = None  # of the latest validation in `fit`
        self.step_sums = torch.zeros(1, 2)  # of the latest step, see `Accumulation.end`
        self.step_loss, self.step_count = torch.tensor(math.nan), torch.tensor(0)
        # For a mixture of experts, see `lit_llm.callbacks.contracts.CountsExperts`.
        self.expert_counts: Tensor | None = None
        self.router_means: dict[str, Tensor] = {}

    # -- building ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        torch.set_float32_matmul_precision(self.compute_config.matmul_precision)  # a setting of the process
        if isinstance(self.data, TokenDataModule):
            self.data.gives_documents = self.config.mask_documents
            if self.data.is_open:
                self.objective.use(self.data, stage)

    def configure_model(self) -> None:
        """Build the model when the data is known. Lightning may call this more than once.

        `config` becomes a copy with the data's vocabulary; the caller's `GPTConfig` does not change.

        Raises:
            UserError: if the model does not fit the data's tokenizer.
        """
        if self.model is not None:
            return
        trainer, data = trainer_of(self), self.data
        self.tokenizer = getattr(data, "tokenizer", None)
        self.token_bytes = getattr(data, "token_bytes", None)
        self.config = config = with_vocabulary(self.config, data)
        strategy = None if trainer is None else trainer.strategy
        mesh = strategy if isinstance(strategy, MeshStrategy) else None
        device = torch.device("cpu") if strategy is None else strategy.root_device
        model: GPT | CustomModel | PipelinedGPT
        if self.lora is not None:
            if strategy is not None:
                self.init_from = strategy.broadcast(self.init_from)  # when resuming, only rank 0 has looked for it
            if self.init_from is None:
                raise UserError("lora trains adapters beside frozen weights: name the run that has them (--init_from)")
            self.base = base_record(self.init_from)
        if self.architecture is not None:
            # Not on the meta device, because a custom class may not support it.
            model = parallelize(CustomModel(config, self.architecture), self.compute_config, device, mesh)
        else:
            # Shard on the meta device, so that each rank allocates only its part.
            with torch.device("meta"):
                model = GPT(config)
            model.ahead_weight = self.loss_config.ahead_weight
            if self.lora is not None:
                apply_lora(model, self.lora)
            model = parallelize(model, self.compute_config, device, mesh)
            model.to_empty(device="cpu" if mesh is None else mesh.parameter_device)
            model.init_weights()
            if not isinstance(model, PipelinedGPT):  # a pipeline has drawn the adapters of all stages
                reset_adapters(model)
        if self.init_from is not None:
            average = self.use_ema and self.lora is None  # the base of adapters has no average
            load_weights(model.whole if isinstance(model, PipelinedGPT) else model, self.init_from, average=average)
        self.model = model

    @property
    def whole_model(self) -> GPT | CustomModel:
        """The whole model, also in a pipeline, where the layers of other ranks are on the meta device."""
        assert self.model is not None
        return self.model.whole if isinstance(self.model, PipelinedGPT) else self.model

    def configure_optimizers(self) -> Optimizer:
        assert self.model is not None
        if isinstance(self.model, PipelinedGPT):
            optimizer, self.model.optimizer_groups = optimizer_of_stage(self.optimizer_factory, self.model.whole)
        else:
            optimizer = optimizer_of(self.model, self.optimizer_factory)
        optimizer.register_load_state_dict_pre_hook(keep_configured_options)
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            # A fused optimizer would unscale fp16 gradients itself, after gradient clipping and the spike guard.
            take_unscaled_gradients(optimizer)
        return optimizer

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token of the data's sequences, see `GPTConfig.flops_per_token` and `flops_saved`.

        For a custom architecture, `own_flops_per_token` counts those of its kernels, or six per parameter.
        """
        length = getattr(self.data, "block_size", None)
        if self.architecture is not None:
            assert self.config.vocab_size is not None
            return sum(own_flops_per_token(self.architecture, self.config.vocab_size, length or self.config.block_size))
        model = self.whole_model
        assert isinstance(model, GPT)
        return self.config.flops_per_token(length) - flops_saved(model)

    def on_fit_start(self) -> None:
        if isinstance(self.model, PipelinedGPT):
            self.model.window = []  # an interrupted fit may have left a part of a step
        self._configured_rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self._first_batch = True

    def on_train_start(self) -> None:
        """Start new loss sums. Without a schedule, apply the configured rates again: a checkpoint has restored its own."""
        if self.reference is not None:  # not earlier: a checkpoint says which weights it needs
            self.reference.prepare(self)
        self.window = Accumulation(  # not earlier: data modules may learn in `train_dataloader` whether every target counts
            self._loss_means(),
            block_size=self.config.block_size,
            equal=self.every_target_counts,
            loss_ranks=self._mesh("loss_ranks", self.trainer.world_size),
        )
        if callback_of(self.trainer, Schedule) is None:
            for group, rate in zip(self.trainer.optimizers[0].param_groups, self._configured_rates, strict=True):
                group["lr"] = rate

    def _loss_means(self) -> LossMeans:
        return LossMeans(getattr(self.data, "source_names", ()), self.objective.means(self.config))

    # -- training ---------------------------------------------------------------------------------------------------

    @property
    def every_target_counts(self) -> bool:
        """Whether all micro-batches have equal weight, because the data module declares that no training target is ignored."""
        declared = getattr(self.data, "every_target_counts", False)
        return declared and self._mesh("context", 1) == 1  # ranks that share a sequence may have padding of it

    @property
    def holds_all_logits(self) -> bool:
        """Whether training has the logits of a whole micro-batch in memory. `HealthSignals` reads it."""
        return self.loss_config.chunk_size is None

    def sums(self, batch: dict[str, Tensor]) -> LossSums:
        return self.sums_of(self._with_reference(batch))

    def sums_of(self, batch: dict[str, Tensor], objective: Objective | None = None) -> LossSums:
        """The loss sums of a batch, which has its reference already, for `objective` or else the module's own."""
        assert self.model is not None
        loss = self.loss_function(batch, objective)
        documents = {"documents": batch["documents"]} if "documents" in batch else {}  # a custom model takes none
        sums = self.model(batch["input_ids"], batch["targets"], loss=loss, **documents)
        assert isinstance(sums, LossSums)
        return sums

    def _with_reference(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch if self.reference is None else self.reference.added_to(batch, self)

    def loss_function(self, batch: dict[str, Tensor], objective: Objective | None = None) -> LossFunction:
        """The function that the model calls with hidden states, output matrix and targets."""
        return (objective or self.objective).function(batch, self.loss_config, self.whole_model)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._first_batch:
            check_batch(batch, self.data)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss over the counted targets of a micro-batch on this rank; 0 if there are none, and in a pipeline."""
        if isinstance(self.model, PipelinedGPT):
            return self.model.collect(self._with_reference(batch))
        sums = self.sums(batch)
        self.window.add(batch, sums)
        return mean_of(sums)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the weighted gradients of a mean loss. In a pipeline, a step's last micro-batch runs the whole schedule.

        The schedule does not run in `training_step`, because Lightning sets gradients to zero after it.
        """
        window = self.window
        if not isinstance(self.model, PipelinedGPT):
            super().backward(loss * window.weight(window.latest_count), *args, **kwargs)
        elif window.is_last:
            accumulate = self.trainer.accumulate_grad_batches
            for batch, sums in self.model.train_step(
                loss=self.loss_function,
                objective=lambda sums: mean_of(sums) * window.weight(sums.count) / accumulate,  # Lightning divides, too
                forward_context=self.trainer.precision_plugin.train_step_context,
            ):
                window.add(batch, sums)

    def first_gradient_scale(self) -> Tensor | float:
        """The factor that makes the gradient of a step's first micro-batch that of its mean loss; inf if no target counts."""
        return self.window.first_gradient_scale(self.trainer.accumulate_grad_batches)

    def _mesh(self, name: str, otherwise: int) -> int:
        """The MeshStrategy's attribute `name`, a number of ranks; `otherwise` with another strategy, or without a Trainer."""
        strategy = getattr(trainer_of(self), "strategy", None)
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
            self.window.is_last = True  # the closures of earlier micro-batches do not come through here
            try:
                result = optimizer_closure()
            finally:
                self.window.is_last = False
            self.step_sums, scale = self.window.end(self.trainer.strategy, self.trainer.accumulate_grad_batches)
            nll, self.step_count = self.step_sums[0]
            self.step_loss = nll / self.step_count
            if scale is not None:
                scale_((p.grad for p in self.parameters() if p.grad is not None), scale)
            if self.window.routers is not None:
                self._end_step_of_routers(self.window.routers)
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def _end_step_of_routers(self, sums: Tensor) -> None:
        """Store what the experts computed in the step, and set the shares that the balancing loss of the next step uses."""
        assert self.config.moe is not None
        self.expert_counts, of_tokens = sums[:, :-2], sums[:, -2:]
        # Not the step's count: an objective may count pairs, and ranks of tensor parallelism route a part of the positions.
        tokens = self.expert_counts.sum(dim=1, keepdim=True) / self.config.moe.top_k
        means = of_tokens / tokens.clamp(min=1)
        self.router_means = {"entropy": means[:, 0], "z": means[:, 1]}
        model = self.whole_model
        assert isinstance(model, GPT)
        for router, counts in zip(model.routers, self.expert_counts, strict=True):
            if not router.shares.is_meta:  # meta: a router of another stage
                shares = counts / counts.sum().clamp(min=1)
                router.shares.copy_(torch.where(counts.sum() > 0, shares, router.shares))

    @property
    def expert_biases(self) -> list[Tensor | None] | None:
        """The bias, (E,), of each block with experts, or None for another rank's block. None if no block has experts."""
        if self.model is None or not isinstance(self.whole_model, GPT):
            return None
        biases = [router.choice_bias for router in self.whole_model.routers]
        return [None if bias.is_meta else bias for bias in biases] or None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print the time of compilation after the first micro-batch. Every launch compiles."""
        if self._first_batch and self.compute_config.compile and self.trainer.is_global_zero:
            seconds = seconds_of_compilation()
            if seconds:  # 0: there is no compiler
                print(f"compile: {seconds:.1f} s for the first micro-batch (--compute.compile)")
        self._first_batch = False

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        step = self.trainer.global_step + 1
        if not is_logged(self.trainer, step):
            return
        row = self.window.losses.row("train", self.step_sums)  # the only read of the loss on the host, on logged steps
        if "train/loss" in row:
            if self.objective.of_tokens:
                row["train/perplexity"] = safe_exp(row["train/loss"])
            write_row(self.trainer, row, step)

    # -- validation and test ----------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        split = "test" if self.trainer.testing else "val"
        token_bytes = self.data.corpus.token_bytes_of(split) if isinstance(self.data, TokenDataModule) else self.token_bytes
        if self.reference is not None:
            self.reference.prepare(self)
        device, of_tokens = self.trainer.strategy.root_device, self.objective.of_tokens
        self.evaluation = Evaluation(split, self._loss_means(), token_bytes, device, of_tokens=of_tokens)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the means, which are over the tokens of all loaders."""
        if not isinstance(self.data, TokenDataModule):  # a TokenDataModule repeats nothing
            if batch_idx == 0:
                check_batch(batch, self.data)
            loaders = self.trainer.test_dataloaders if self.trainer.testing else self.trainer.val_dataloaders
            batch = without_repeats(batch, batch_idx, CombinedLoader(loaders).flattened[dataloader_idx])
        # The last batch may be smaller. Computing it without compiled blocks is faster than compiling them for its size.
        with torch.compiler.set_stance("default" if batch_idx == 0 else "eager_on_recompile"):
            sums = self.sums(batch)
        self.evaluation.update(batch, sums, parts=self._mesh("batch_parts", 1))

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        row = self.evaluation.compute()
        if self.objective.of_tokens and not self.trainer.sanity_checking:
            row |= self._compressors_row(self.evaluation.prefix)
        # log_dict fills callback_metrics (EarlyStopping, checkpoints) and the result of `trainer.validate`. While fitting,
        # Lightning would log one step early, so `write_row` logs instead.
        fitting = self.trainer.state.fn == "fit"
        self.log_dict(row, logger=not fitting)
        if fitting and not self.trainer.sanity_checking:
            write_row(self.trainer, row, self.trainer.global_step)
            self.validated_step = self.trainer.global_step

    on_test_epoch_end = on_validation_epoch_end

    def _compressors_row(self, split: str) -> dict[str, float]:
        """Bits per byte of gzip and xz on the evaluated text, which rank 0 measures in the first evaluation of a split."""
        if split not in self._compressors:
            row: dict[str, float] = {}
            if self.trainer.is_global_zero:
                row, sentence = compressors(self.trainer, self.data, split)
                print(sentence)
            self._compressors[split] = self.trainer.strategy.broadcast(row)
        return self._compressors[split]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_entries(self, checkpoint)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        add_entries(self, checkpoint)
        for logger in self.trainer.loggers:
            logger.save()  # rows of steps in a checkpoint must survive a kill: a resumed run does not write them again
