"""The LightningModule that trains a language model. Its methods are in the order of their calls: build, steps, validation.

It calls other modules for what only some runs need: a pipeline's schedule (`distributed/pipeline_parallel.py`), sums of routers
(`models/router.py`), adapters (`models/lora.py`), the loss (`objective.py`), the reference of preference losses
(`reference.py`), entries of checkpoints and averaged weights (`saved_state.py`), and what callbacks read (`answers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_llm.callbacks import Schedule
from lit_llm.callbacks._lightning import accumulates, callback_of, is_logged, write_row
from lit_llm.callbacks.gradient_norm_and_clipping import scale_
from lit_llm.checkpoint.adapters import base_record
from lit_llm.checkpoint.load_weights import load_weights
from lit_llm.core._lightning import trainer_of
from lit_llm.core._torch import seconds_of_compilation, take_unscaled_gradients
from lit_llm.core.errors import refuse
from lit_llm.data import TokenDataModule
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallelize import parallelize
from lit_llm.distributed.pipeline_parallel import PipelinedGPT
from lit_llm.models.custom import Architecture, CustomModel
from lit_llm.models.gpt import GPT, GPTConfig, LossFunction
from lit_llm.models.lora import LoRAConfig, apply_lora
from lit_llm.models.loss import LossConfig, LossSums
from lit_llm.models.router import end_step
from lit_llm.optim import MuonAdamW, optimizer_of
from lit_llm.optim.transfer import optimizer_of_stage
from lit_llm.training.accumulation import Accumulation, LossMeans, mean_of
from lit_llm.training.answers import Answers
from lit_llm.training.compressors import Compressors
from lit_llm.training.data_vocabulary import check_batch, with_vocabulary
from lit_llm.training.evaluation import Evaluation, safe_exp, without_repeats
from lit_llm.training.objective import CrossEntropy, Objective
from lit_llm.training.reference import Reference
from lit_llm.training.saved_state import add_entries, check_entries, keep_configured_options


class LanguageModel(Answers):
    """Trains a GPT, or a custom architecture, with next-token cross-entropy or another objective.

    Losses are means over the *global* batch: per token, or per pair for preferences.

    Batches are dicts of `input_ids` and `targets`, both (B, T) int64. Targets of -100 are ignored. Optional: `sources`, (B,)
    int64 indices into the data module's `source_names`, and `documents`, as in `GPT.forward`.

    Logs, at optimizer step 1 and every `trainer.log_every_n_steps`: `train/loss` (nats per token over that step's global
    batch, all ranks and micro-batches) and `train/perplexity`; after validation `val/loss`, `val/perplexity` and, if the
    data module has a tokenizer, `val/bits_per_byte`. With sources also `train/SOURCE/loss` and `val/SOURCE/loss`. With
    `model.predict_ahead` also `train/loss_ahead` (nats per token, over all tokens further ahead; `train/loss` is without them).
    If no target of a step, or of a source in a step, is counted, the loss of the step, or of the source, is not logged.

    Args:
        architecture: a custom model instead of a GPT. It uses only block_size, vocab_size and eos_id of `model`.
        init_from: a checkpoint whose weights replace the random initial ones.
        objective: the loss to minimise; None: cross-entropy. Another objective may log other metrics.
        use_ema: load the moving average of the weights (EMA) from `init_from`, and from a checkpoint that is evaluated.
        lora: settings of adapters, trained while the weights of `init_from` are frozen. Checkpoints have only the adapters.

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
        self.config, self.architecture, self.optimizer_factory = model, architecture, optimizer
        self.loss_config, self.compute_config = loss or LossConfig(), compute or ComputeConfig()
        self.init_from, self.use_ema, self.lora = init_from, use_ema, lora
        self.objective = objective or CrossEntropy()
        problems = model.problems() + self.loss_config.problems() + self.compute_config.problems()
        if architecture is not None:
            problems += architecture.problems(model, self.loss_config.chunk_size, self.compute_config)
        refuse(problems)
        self.strict_loading = lora is None  # a LoRA checkpoint lacks the base weights; `on_load_checkpoint` compares names
        self.base: dict[str, str] | None = None  # path and sha256 of the base weights, for checkpoints
        self.model: GPT | CustomModel | PipelinedGPT | None = None  # built when vocabulary and strategy are known
        self.reference = Reference(used=self.objective.uses_reference)
        self.window: Accumulation  # the loss sums of the current optimizer step
        self.step_sums = torch.zeros(1, 2)  # of the latest step, see `Accumulation.end`
        # Values of the latest step for callbacks, see `lit_llm.callbacks.contracts`. The loss is in nats, without z-loss.
        self.step_loss, self.step_count = torch.tensor(float("nan")), torch.tensor(0)
        self.expert_counts: Tensor | None = None
        self.router_means: dict[str, Tensor] = {}
        self.evaluation: Evaluation  # of the current validation or test
        self.validated_step: int | None = None  # of the latest validation in `fit`
        self._first_batch = False  # whether the next batch is the first of a launch of `fit`
        self._compressors = Compressors()

    # -- build ------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        torch.set_float32_matmul_precision(self.compute_config.matmul_precision)  # a setting of the process
        if isinstance(self.data, TokenDataModule):
            self.data.gives_documents = self.config.mask_documents
            if self.data.is_open:
                self.objective.use(self.data, stage)

    def configure_model(self) -> None:
        """Build the model, when the data module is known. Lightning may call this several times; later calls do nothing.

        `self.config` becomes a copy with the data's vocabulary size. The caller's `GPTConfig` is not changed.

        Raises:
            UserError: if the model does not fit the data's tokenizer, or `lora` is set without base weights (`init_from`).
        """
        if self.model is not None:
            return
        self.config = with_vocabulary(self.config, self.data)
        strategy, mesh = getattr(trainer_of(self), "strategy", None), self.mesh
        device = torch.device("cpu") if strategy is None else strategy.root_device
        if self.lora is not None:
            if strategy is not None:
                self.init_from = strategy.broadcast(self.init_from)  # when resuming, only rank 0 knows the path
            self.base = base_record(self.init_from)
        model: GPT | CustomModel | PipelinedGPT
        if self.architecture is not None:
            # Not on the meta device, because a custom class may not support it.
            model = parallelize(CustomModel(self.config, self.architecture), self.compute_config, device, mesh)
        else:
            # Shard on the meta device, so that each rank allocates only its part.
            with torch.device("meta"):
                model = GPT(self.config)
            model.ahead_weight = self.loss_config.ahead_weight
            if self.lora is not None:
                apply_lora(model, self.lora)
            model = parallelize(model, self.compute_config, device, mesh)
            model.to_empty(device="cpu" if mesh is None else mesh.parameter_device)
            model.init_weights()
        if self.init_from is not None:
            average = self.use_ema and self.lora is None  # the base of adapters has no average
            load_weights(model.whole if isinstance(model, PipelinedGPT) else model, self.init_from, average=average)
        self.model = model  # assigned last, so that after an error the next call builds again

    def configure_optimizers(self) -> Optimizer:
        assert self.model is not None
        if isinstance(self.model, PipelinedGPT):
            optimizer, self.model.optimizer_groups = optimizer_of_stage(self.optimizer_factory, self.model.whole)
        else:
            optimizer = optimizer_of(self.model, self.optimizer_factory)
        has_schedule = callback_of(self.trainer, Schedule) is not None  # it compares the checkpoint's rates with its own
        optimizer.register_load_state_dict_pre_hook(partial(keep_configured_options, rates=not has_schedule))
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            # A fused optimizer would unscale fp16 gradients itself, after gradient clipping and the spike guard.
            take_unscaled_gradients(optimizer)
        return optimizer

    # -- training step ----------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Prepare the reference of preference losses, and start new loss sums. Checkpoint and data are loaded by then."""
        self.reference.prepare(self)  # after the checkpoint is loaded, which identifies the reference's weights
        loss_ranks = self.trainer.world_size if self.mesh is None else self.mesh.loss_ranks
        self.window = Accumulation(  # a data module may learn in `train_dataloader` whether every target counts
            self._means(), block_size=self.config.block_size, equal=self.every_target_counts, loss_ranks=loss_ranks
        )
        if isinstance(self.model, PipelinedGPT):
            self.model.window = []  # an interrupted fit may have left a part of a step
        self._first_batch = True

    def _means(self) -> LossMeans:
        return LossMeans(getattr(self.data, "source_names", ()), self.objective.means(self.config))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Add the batch's loss sums to the sums of the optimizer step, and return the batch's mean loss (`mean_of`).

        In a pipeline, store the batch for `backward`, which computes the losses of a whole step, and return 0.
        """
        if self._first_batch:
            check_batch(batch, self.data)
        batch = self.reference.added_to(batch, self)
        if isinstance(self.model, PipelinedGPT):
            return self.model.collect(batch)
        sums = self.sums_of(batch)
        self.window.add(batch, sums)
        return mean_of(sums)

    def sums_of(self, batch: dict[str, Tensor], objective: Objective | None = None) -> LossSums:
        """Run the model on a batch, and return the batch's loss sums for an objective (None: the module's). An objective with a
        reference needs batch["reference"]."""
        assert self.model is not None
        loss = self.loss_function(batch, objective)
        documents = {"documents": batch["documents"]} if "documents" in batch else {}  # a custom model takes none
        sums = self.model(batch["input_ids"], batch["targets"], loss=loss, **documents)
        assert isinstance(sums, LossSums)
        return sums

    def loss_function(self, batch: dict[str, Tensor], objective: Objective | None = None) -> LossFunction:
        """The function that the model calls with hidden states, output matrix and targets to get the loss sums."""
        return (objective or self.objective).function(batch, self.loss_config, self.whole_model)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of `loss` times `Accumulation.weight`. In a pipeline, run the schedule of a whole step instead.

        A pipeline does so at the step's last micro-batch: `training_step` is too early, as Lightning zeroes gradients after it.
        """
        window, accumulate = self.window, self.trainer.accumulate_grad_batches
        if not isinstance(self.model, PipelinedGPT):
            super().backward(loss * window.weight(window.latest_count), *args, **kwargs)
        elif not accumulates(self.trainer):
            self.model.train_step(
                loss=self.loss_function,
                objective=lambda sums: mean_of(sums) * window.weight(sums.count) / accumulate,  # as Lightning else does
                record=window.add,
                forward_context=self.trainer.precision_plugin.train_step_context,
            )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a launch's first micro-batch, if `compute.compile`, print on rank 0 the seconds that torch.compile took."""
        says = self._first_batch and self.compute_config.compile and self.trainer.is_global_zero
        if says and (seconds := seconds_of_compilation()):  # 0: there is no compiler
            print(f"compile: {seconds:.1f} s for the first micro-batch (--compute.compile)")
        self._first_batch = False

    # -- optimizer step ---------------------------------------------------------------------------------------------

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take an optimizer step. Before callbacks read gradients, scale them to those of the mean over all counted targets."""

        def closure() -> Any:
            result = optimizer_closure()  # training step and backward pass of the step's last micro-batch
            window = self.window
            self.step_sums, scale = window.end(self.trainer.strategy, self.trainer.accumulate_grad_batches)
            nll, self.step_count = self.step_sums[0]
            self.step_loss = nll / self.step_count
            if scale is not None:
                scale_((p.grad for p in self.parameters() if p.grad is not None), scale)
            if window.routers is not None:
                self.expert_counts, self.router_means = end_step(self.whole_model.routers, window.routers)
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        step = self.trainer.global_step + 1
        # The host reads the loss only here, on logged steps.
        row = self.window.losses.row("train", self.step_sums) if is_logged(self.trainer, step) else {}
        if "train/loss" in row:
            if self.objective.of_tokens:
                row["train/perplexity"] = safe_exp(row["train/loss"])
            write_row(self.trainer, row, step)

    # -- validation and test ----------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        split, data, device = "test" if self.trainer.testing else "val", self.data, self.trainer.strategy.root_device
        is_ours = isinstance(data, TokenDataModule)
        token_bytes = data.corpus.token_bytes_of(split) if is_ours else getattr(data, "token_bytes", None)  # (V,)
        self.reference.prepare(self)
        self.evaluation = Evaluation(split, self._means(), token_bytes, device, of_tokens=self.objective.of_tokens)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the loss sums of a batch to the evaluation, whose means are over the counted targets of all loaders."""
        if not isinstance(self.data, TokenDataModule):  # a TokenDataModule repeats no samples
            if batch_idx == 0:
                check_batch(batch, self.data)
            batch = without_repeats(batch, batch_idx, self.trainer, dataloader_idx)
        # The last batch may be smaller. Running it in eager mode is faster than compiling for its size.
        with torch.compiler.set_stance("default" if batch_idx == 0 else "eager_on_recompile"):
            sums = self.sums_of(self.reference.added_to(batch, self))
        self.evaluation.update(batch, sums, parts=1 if self.mesh is None else self.mesh.batch_parts)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        row = self.evaluation.compute()
        if self.objective.of_tokens and not self.trainer.sanity_checking:
            row |= self._compressors.row(self.trainer, self.data, self.evaluation.prefix)
        # log_dict fills callback_metrics (EarlyStopping, checkpoints) and the result of `trainer.validate`. While fitting,
        # Lightning would log one step early, so `write_row` logs instead.
        fitting = self.trainer.state.fn == "fit"
        self.log_dict(row, logger=not fitting)
        if fitting and not self.trainer.sanity_checking:
            write_row(self.trainer, row, self.trainer.global_step)
            self.validated_step = self.trainer.global_step

    on_test_epoch_end = on_validation_epoch_end

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_entries(self, checkpoint)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        add_entries(self, checkpoint)
        for logger in self.trainer.loggers:
            logger.save()  # rows of steps in a checkpoint must survive a kill: a resumed run does not write them again
