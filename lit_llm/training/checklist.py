"""The checks of the command `check`, one line each: of three training steps, then of the trained model and the loader."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_llm import callbacks
from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.core._lightning import set_max_steps
from lit_llm.core.errors import UserError
from lit_llm.data.blocks import Blocks, MixtureBlocks
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.run_length import run_length, steps_of_run
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT, reset_adapters
from lit_llm.optim import optimizer_of
from lit_llm.runs.run_folder import CHECKPOINTS
from lit_llm.training.coordinate_check import LARGEST_POWER, width_powers
from lit_llm.training.data_vocabulary import check_batch
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.objective import CrossEntropy
from lit_llm.training.saved_state import saved_weights

Say = Callable[[str], None]
STEPS = 3
FIRST_LOSS_TOLERANCE = 0.05
OVERFIT_STEPS, OVERFIT_TOKENS = 200, 128
OVERFIT_RATIO, OVERFIT_RATIO_OF_TRAINED = 0.5, 0.95  # accepted last loss / first loss; rates for trained weights are low

LOADER_SECONDS, LOADER_BATCHES = 2.0, 500
LOADER_SHARE = 0.05
"""The largest accepted share of (time to load a batch) in (time to train on a batch)."""
TOY_PARAMETERS = 1_000_000
"""The loader's speed is not tested for a model with fewer parameters than this, which trains about as fast as data are read."""


@dataclass(frozen=True)
class Line:
    """Record of a line of the checklist: the name of the check, whether it passed, and what it found, as text."""

    name: str
    passed: bool
    found: str


class Observer(Callback):
    """Records batches, losses and seconds of the first `STEPS` steps, and parameters without gradient; then stops training."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.without_gradient: list[str] = []
        self.seconds: list[float] = []
        self._count, self._since = 0, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        check_batch(batch, pl_module.data)  # callbacks come before the module's own check
        self.batches.append({name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)})
        if self._count == 0:
            self._since = time.perf_counter()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._count += 1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        assert isinstance(pl_module, LanguageModel)
        if pl_module.step_count:  # targets may be ignored
            self.losses.append(float(pl_module.step_loss))
        # Blocks may start as the identity. Parameters behind a zero matrix have no gradient before the second update.
        self.without_gradient = [
            name
            for name, p in pl_module.named_parameters()
            if p.requires_grad and (p.grad is None or not p.grad.isfinite().all() or not p.grad.any())
        ]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._count == trainer.accumulate_grad_batches:
            self.seconds.append(time.perf_counter() - self._since)
            self._count = 0
        if trainer.global_step >= STEPS:
            trainer.should_stop = True


class CheckedRun:
    """Holds a temporary run of a recipe on one device, with an `Observer` of the run's first steps.

    Args:
        run_dir: an empty folder for the run.
        trained: whether the model starts with trained weights.
        say: a function that prints a line of progress.
    """

    def __init__(
        self, trainer: Trainer, model: LanguageModel, datamodule: Any, run_dir: Path, *, trained: bool, say: Say = print
    ) -> None:
        self.observer, self.say = Observer(), say
        self.trainer, self.model, self.datamodule = trainer, model, datamodule
        self.run_dir, self.trained = run_dir, trained
        if isinstance(datamodule, TokenDataModule):
            self._recipes_batch = datamodule.micro_batch_size, datamodule.global_batch_size, datamodule.ramp
            if trainer.max_epochs not in (None, -1):  # before `cut_batch`: a smaller batch has more steps per epoch
                datamodule.prepare_data()
                datamodule.setup()
                set_max_steps(trainer, steps_of_run(datamodule, trainer.max_steps, trainer.max_epochs))
        # A ramp needs the recipe's own batch size, which `cut_batch` changes.
        kept = [c for c in self.trainer.callbacks if not isinstance(c, callbacks.BatchRamp)]  # type: ignore[attr-defined]
        self.trainer.callbacks = [*kept, self.observer]  # type: ignore[attr-defined]
        self.precision = trainer.precision_plugin.forward_context

    def run_lines(self) -> list[str]:
        """Return lines of text about the length of the run with the recipe's own batch, not the cut one. Empty without
        max_steps, and for a user's data module. Call this after `checklist`, which opens the data."""
        data = self.datamodule
        if not isinstance(data, TokenDataModule) or self.trainer.max_steps == -1:
            return []
        cut = data.micro_batch_size, data.global_batch_size, data.ramp
        data.micro_batch_size, data.global_batch_size, data.ramp = self._recipes_batch
        lines = [f"run: {run_length(data, self.trainer.max_steps)}", *data.describe_phases()]
        data.micro_batch_size, data.global_batch_size, data.ramp = cut
        if len(data.source_names) > 1:
            lines.append("validation: one batch, so a source without text in it has no loss here")
        return lines

    def cut_batch(self) -> str:
        """Reduce the global batch to at most 2 micro-batches of at most 2 sequences; return a description of the batch.

        The batch of a data module without a `global_batch_size` is not changed.
        """
        data = self.datamodule
        configured = getattr(data, "global_batch_size", None)
        if configured is None:
            return "the recipe's batch"
        micro = min(data.micro_batch_size or configured, 2)
        data.micro_batch_size, data.global_batch_size = micro, min(configured // micro, 2) * micro
        return f"batches of {data.global_batch_size} sequences instead of {configured} (--full_batch true for the whole batch)"


def checklist(run: CheckedRun) -> list[Line]:
    """Train three steps, then run all checks, and return a line for each check. `run.say` announces checks that take long."""
    trainer, module = run.trainer, run.model
    run.say(f"training {STEPS} steps …")
    trainer.fit(module, datamodule=run.datamodule)
    loss = first_loss(run.observer, module.whole_model, trained=run.trained, of_tokens=module.objective.of_tokens)
    if run.observer.losses:
        lines = [shifted_labels(run.observer, _packed_documents(run)), loss, gradients(run.observer)]
    else:
        lines = [no_target(run.datamodule), loss]
    lines.append(save_and_load(run))
    module.to(trainer.strategy.root_device)
    run.say("mask, files, loader …")
    lines += [causal_mask(run), *data_files(run.datamodule), *loader(run), overfitting(run)]
    run.say("coordinate check …")
    return [*lines, coordinates(run)]


def data_files(data: Any) -> list[Line]:
    """Check that each token file has the hash in meta.json. Returns one line, or none for a user's own data module."""
    if not isinstance(data, TokenDataModule):
        return []
    problems, files = list(data.opened.files.problems()), data.opened.files
    unlisted = f", but no meta.json lists {files.unlisted:,} of them" if files.unlisted else ""
    return [Line("data files", not problems, "; ".join(problems[:3]) or f"{files.bytes:,} bytes hashed{unlisted}")]


# -- tests of the first steps -----------------------------------------------------------------------------------------


def no_target(data: Any) -> Line:
    """The failed line that replaces the checks of labels and gradients if all targets of the three steps are ignored."""
    why = data.opened.cut_conversations() if isinstance(data, TokenDataModule) else ""
    masks = "the masks of the data leave every token out (look at it: --show 2)"
    why_not = f"no target in these {STEPS} steps: {f'{why}, or ' if why else ''}{masks}"
    return Line("labels and gradients", False, why_not)


def shifted_labels(observer: Observer, packed: Tensor | None = None) -> Line:
    """Check that the target of each position is the next input id of the same document.

    Args:
        packed: (n, T), the document number of each position, for the n rows observed; None: rows are consecutive tokens.
    """
    equal = total = learned = rows = 0
    for batch in observer.batches:
        targets, following = batch["targets"][:, :-1], batch["input_ids"][:, 1:]
        counted = targets != -100
        learned += int((batch["targets"] != -100).sum())
        if packed is not None:
            documents = packed[rows : rows + len(targets)]
            counted &= documents[:, :-1] == documents[:, 1:]
        rows += len(targets)
        equal += int((targets == following)[counted].sum())
        total += int(counted.sum())
    name = "labels shifted by one"
    if learned and not total:  # answers of one token
        return Line(name, True, f"not tested: none of {learned:,} targets has a next input in its document")
    return Line(name, equal == total > 0, f"{equal:,} of {total:,} targets are the next input")


def _packed_documents(run: CheckedRun) -> Tensor | None:
    """The document number of each position, (n, T), for the n rows observed; None if rows are consecutive tokens."""
    data = run.datamodule
    if not isinstance(data, TokenDataModule) or data.packing == "concatenate":
        return None
    asked, data.gives_documents = data.gives_documents, True
    loaded = data.train_dataloader()
    data.gives_documents = asked
    rows = sum(len(batch["input_ids"]) for batch in run.observer.batches)  # the first samples of the run
    documents: Tensor = loaded.dataset[data.locate(np.arange(rows))]["documents"]
    return documents


def first_loss(observer: Observer, model: GPT | CustomModel, *, trained: bool = False, of_tokens: bool = True) -> Line:
    """Check that the first loss is near ln V nats (V ids): an untrained model predicts all equally. `trained`: it may be less.

    If `of_tokens` is false, the loss is per pair of answers, and is not tested.
    """
    assert model.config.vocab_size is not None
    if not observer.losses:
        return Line("first loss is ln V", True, f"not tested: no target in {STEPS} steps")
    if not of_tokens:
        return Line("first loss is ln V", True, f"not tested: {observer.losses[0]:.4f} is a loss of pairs, not of tokens")
    expected, loss = math.log(model.config.vocab_size), observer.losses[0]
    off = loss / expected - 1
    right = off <= FIRST_LOSS_TOLERANCE and (trained or off >= -FIRST_LOSS_TOLERANCE)
    why = "" if right else ": initialisation (torch draws embeddings with std 1), labels or mask are wrong"
    return Line("first loss is ln V", not why, f"{loss:.4f}, ln {model.config.vocab_size:,} = {expected:.4f} ({off:+.1%}){why}")


def gradients(observer: Observer) -> Line:
    """Check that every trained parameter has a finite, non-zero gradient in the last observed step."""
    missing = observer.without_gradient
    seen = f"none, zero or not finite: {', '.join(missing[:5])}" if missing else f"all, in step {STEPS}"
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return Line("every parameter gets a gradient", not missing, seen + more)


def save_and_load(run: CheckedRun) -> Line:
    """Check that the last checkpoint contains the trained weights, bit for bit, and can be loaded."""
    name = "a save and a load"
    path = max((run.run_dir / CHECKPOINTS).glob("step-*.ckpt"), default=run.run_dir / "by-hand.ckpt")
    if not path.exists():
        run.trainer.save_checkpoint(path)
    saved = read(path)
    trained = {key: value.cpu() for key, value in saved_weights(run.model, run.model.state_dict()).items()}
    different = [
        key
        for key, value in trained.items()
        if key not in saved["state_dict"] or not torch.equal(saved["state_dict"][key], value)
    ]
    if different or saved["global_step"] != run.trainer.global_step:
        return Line(name, False, f"not equal to the trained model: {', '.join(different[:5]) or 'the step'} ({path.name})")
    try:
        load_model(path)
    except UserError as error:
        return Line(name, False, f"does not fit the model: {error}")
    return Line(name, True, f"{len(trained)} tensors, bit for bit")


# -- tests after training ---------------------------------------------------------------------------------------------


def causal_mask(run: CheckedRun) -> Line:
    """Check, in eval and train mode, that no prediction depends on a later token, nor, with document masks, on an earlier
    document.

    During the check, noise is added to the weights: a projection whose weights are near zero would hide a leak.
    """
    model = run.model.model
    assert model is not None
    if run.model.compute_config.float8:  # float8 changes predictions by up to 8 % of the largest logit
        return Line("mask", True, "not tested: scales in float8 depend on all positions (test with --compute.float8 false)")
    kept = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
    generator = torch.Generator(run.trainer.strategy.root_device).manual_seed(0)
    for p, _ in kept:
        noise = torch.randn(p.shape, generator=generator, device=generator.device).to(p.dtype)
        p.data.add_(noise, alpha=(p.size(-1) if p.ndim else 1) ** -0.5)
    passed, difference = _leaks(run, model, generator)
    for p, value in kept:
        p.data.copy_(value)
    return Line("mask", passed, difference)


def _leaks(run: CheckedRun, model: nn.Module, generator: torch.Generator) -> tuple[bool, str]:
    """Return (True if no prediction depends on tokens that it must not see, what was found as text).

    Each test changes all tokens from one position on. The model gets one sequence at a time: sequences may share experts.
    """
    config, device, seed = run.model.whole_model.config, generator.device, callbacks.StepSeed()
    assert config.vocab_size is not None
    ids = run.observer.batches[0]["input_ids"][:1].to(device)  # (1, T)
    other = ids + torch.randint(1, config.vocab_size, ids.shape, generator=generator, device=device)
    other, length, middle = other % config.vocab_size, ids.size(1), ids.size(1) // 2
    documents = {"documents": torch.arange(length, device=device)[None] // max(middle, 1)} if config.mask_documents else {}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def logits(ids: Tensor) -> Tensor:
        """Logits (T, V) of ids (1, T), computed with the same random numbers and buffers in each call."""
        seed.on_train_start(run.trainer, run.model)
        seed.on_train_batch_start(run.trainer, run.model, None, 0)
        with torch.no_grad(), run.precision():
            z: Tensor = model(ids, **documents)
        for buffer, value in buffers:
            buffer.copy_(value)
        return z[0]

    for mode in ("evaluation", "training"):
        model.train(mode == "training")
        before = logits(ids)
        rounding = (1e-3 if "32" in run.trainer.precision else 1e-2) * before.abs().max()

        def moved(first: Tensor, last: Tensor, cut: int, before: Tensor = before) -> Tensor:
            """Join the first `cut` tokens of `first` and the later tokens of `last`. Return, (T,), the largest change of a
            logit from `before` at each position."""
            return (logits(torch.cat([first[:, :cut], last[:, cut:]], dim=1)) - before).abs().amax(dim=-1)

        if not moved(ids, ids, 0).max() <= rounding:
            return True, f"not tested in {mode}: two passes over the same tokens differ"
        if not moved(other, other, 0).max() > 0:
            return False, f"in {mode}, tokens have no effect"
        for cut in _cuts(length):
            early = moved(ids, other, cut)[:cut]
            if early.max() > rounding:
                return False, f"in {mode}, the prediction at position {int(early.argmax())} depends on tokens from {cut} on"
        if documents and moved(other, ids, middle)[middle:].max() > rounding:
            return False, f"in {mode}, predictions depend on the document before theirs, which ends at {middle}"
    return True, f"no prediction of {length:,} depends on a later token" + (", nor on another document" if documents else "")


def _cuts(length: int) -> list[int]:
    """Positions from which on `_leaks` changes tokens, of a sequence of `length`. Consecutive positions find a leak at every
    n-th position. Early positions find a small leak, because a leaked token has a large share of the attention there."""
    parts = range(1, 16), range(length // 2, length // 2 + 8), range(length - 8, length)
    return sorted({cut for part in parts for cut in part if 0 < cut < length})


def loader(run: CheckedRun) -> list[Line]:
    """Read batches without training. Returns two lines: do sequences repeat, and does loading take under 5 % of the time?"""
    seen: set[bytes] = set()
    repeated = sequences = tokens = 0
    loaded = run.datamodule.train_dataloader()
    drawn: Counter[int] = Counter()  # source → sequences
    batches = iter(loaded)
    spent = 0.0
    for _ in range(LOADER_BATCHES):
        start = time.perf_counter()
        batch = next(batches, None)
        spent += time.perf_counter() - start
        if batch is None:
            break
        tokens += batch["input_ids"].numel()
        drawn.update(batch["sources"].tolist() if "sources" in batch else [0] * len(batch["input_ids"]))
        for row in batch["input_ids"]:
            key = row.numpy().tobytes()
            repeated += key in seen
            seen.add(key)
            sequences += 1
        if spent > LOADER_SECONDS:
            break
    sizes = _blocks_per_epoch(loaded.dataset)
    # A second pass over a small source must repeat. The training steps may have read a part of the first pass.
    before = run.datamodule.consumed_samples if sizes else 0
    again = {source: number + before - sizes[source] for source, number in drawn.items() if source in sizes}
    again = {source: number for source, number in again.items() if number > 0}
    unique = repeated - sum(again.values()) <= 0.01 * sequences
    text = f"{repeated:,} of {sequences:,} sequences are repeats"
    if again:
        epochs = " and ".join(f"{sizes[source]:,}" for source in again)
        text += f", up to {sum(again.values()):,} expected because an epoch has {epochs}"
    names = "data do not repeat", "loader is fast enough"
    if not tokens:
        return [Line(name, True, "not tested: no batch is left after trainer.max_steps") for name in names]
    trained = sum(b["input_ids"].numel() for b in run.observer.batches) / STEPS / min(run.observer.seconds)  # tokens/s
    speed = tokens / max(spent, 1e-9)
    share = trained / speed
    text_speed = f"loader {speed:,.0f} tokens/s, training {trained:,.0f}: loading takes {share:.1%} of the time"
    toy = sum(p.numel() for p in run.model.parameters()) < TOY_PARAMETERS
    if toy and share >= LOADER_SHARE:
        text_speed += f"; not tested for a model below {TOY_PARAMETERS:,} parameters"
    fast = toy or share < LOADER_SHARE
    return [Line(names[0], unique, text), Line(names[1], fast, text_speed)]


def _blocks_per_epoch(dataset: Any) -> dict[int, int]:
    """Return {index of a source: number of its sequences in an epoch}; {0: number} without a mixture, {} for other datasets."""
    if isinstance(dataset, MixtureBlocks):
        return {source: len(blocks) for source, blocks in dataset.blocks.items()}
    return {0: len(dataset)} if isinstance(dataset, Blocks) else {}


def overfitting(run: CheckedRun) -> Line:
    """Train on one short batch, and check that its loss falls to 0.5 of its first loss; of trained weights, to 0.95 of it."""
    name, module, trainer = "one batch can be overfitted", run.model, run.trainer
    if not run.observer.losses:
        return Line(name, True, f"not tested: no target in {STEPS} steps")
    if not module.objective.of_tokens:
        return Line(name, True, "not tested: the recipe's rate is that of a loss of pairs, too low to learn tokens")
    fresh = module.lora is None and not run.trained
    goal = OVERFIT_RATIO if fresh else OVERFIT_RATIO_OF_TRAINED
    model, device = module.model, trainer.strategy.root_device
    assert model is not None
    if fresh:
        model.init_weights()
    reset_adapters(model)
    model.train()
    optimizer = optimizer_of(model, module.optimizer_factory)
    peaks = [group["lr"] for group in optimizer.param_groups]
    batch = {name: value.to(device) for name, value in _part_to_learn(run.observer).items()}
    first = loss = math.nan
    step = 0
    for step in range(1, OVERFIT_STEPS + 1):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, step / 10)
        with run.precision():
            sums = module.sums_of(batch, CrossEntropy())
        mean = sums.loss / sums.count
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = float(sums.nll / sums.count)
        first = loss if step == 1 else first
        if step % 20 == 1:
            run.say(f"one batch: step {step} of at most {OVERFIT_STEPS}, loss {loss:.2f}")
        if loss < goal * first or not math.isfinite(loss):
            break
    text = f"loss {first:.2f} to {loss:.2f} in {step} steps on {batch['input_ids'].numel()} tokens, at the recipe's peak rate"
    return Line(name, loss < goal * first, text)


def coordinates(run: CheckedRun) -> Line:
    """Check, if base_width is set, that updates change activations equally at every width. Else only report the changes."""
    name, module = "coordinate check", run.model
    model = module.whole_model
    if not isinstance(model, GPT) or module.lora is not None or model.config.moe is not None:
        return Line(name, True, "not tested: only a GPT without experts that is trained whole can have model.base_width")
    powers = width_powers(model.config, module.optimizer_factory)
    seen = "updates change " + ", ".join(f"{what} with width^{power:+.2f}" for what, power in powers.items())
    if model.config.base_width is None:
        return Line(name, True, f"{seen}: the best rate depends on the width (model.base_width is not set)")
    wrong = [what for what, power in powers.items() if not abs(power) <= LARGEST_POWER]
    return Line(name, not wrong, f"{seen}: {'one rate is right for every width' if not wrong else f'beyond ±{LARGEST_POWER}'}")


def _part_to_learn(observer: Observer) -> dict[str, Tensor]:
    """A batch (2, t) cut from the observed micro-batch with most targets: two rows, t ≤ `OVERFIT_TOKENS` consecutive positions.

    Rows and positions are those with most targets: data with masks have long stretches without targets.
    """
    learned = [batch["targets"] != -100 for batch in observer.batches]
    batch = observer.batches[int(np.argmax([int(each.sum()) for each in learned]))]
    counts = (batch["targets"] != -100).sum(dim=1)  # (B,)
    rows = counts.sort(descending=True, stable=True).indices[:2]
    parts = (batch["targets"][rows] != -100).sum(dim=0).split(OVERFIT_TOKENS)
    start = OVERFIT_TOKENS * int(np.argmax([int(part.sum()) for part in parts]))
    return {name: each[rows, start : start + OVERFIT_TOKENS] for name, each in batch.items() if each.ndim == 2}
