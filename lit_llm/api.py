"""The Python interface: builds a recipe's model, data and Trainer, trains them, and loads a trained model of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_llm.callbacks.errors import flags
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.config import spelling
from lit_llm.config.arguments import read
from lit_llm.config.build import build
from lit_llm.config.groups import flag_of
from lit_llm.config.objects import RunObjects
from lit_llm.config.resolve import decide, read_spec
from lit_llm.core.hardware import chosen_device
from lit_llm.core.yaml_reading import as_flag
from lit_llm.models.generation import Sampling as Sampling
from lit_llm.models.generation import end_id, generate, prompt_ids
from lit_llm.plan.host_memory import memory_problem
from lit_llm.runs.run_folder import expanded
from lit_llm.runs.saved_run import SavedRun, named_checkpoint, no_tokenizer
from lit_llm.training.fit import fit as _fit
from lit_llm.training.lost_peer import record_collectives
from lit_llm.training.output_streams import log_to


def load_recipe(*configs: str | Path, settings: Mapping[str, Any] | None = None) -> RunObjects:
    """Build what `fit --config …` builds, and return it with the attributes `trainer`, `model`, `datamodule` and `config`.

    The attributes are Lightning objects: `recipe.trainer.fit(recipe.model, datamodule=recipe.datamodule)` trains, too. This
    function writes no files and reads no data.

    Args:
        configs: names of shipped recipes or paths of YAML files. A later recipe overrides an earlier one, key by key.
        settings: values by dotted key: ``{"trainer.max_steps": 100}`` is the flag --trainer.max_steps 100.

    Raises:
        UserError: The recipe has mistakes. The message has one line for each mistake.
    """
    words = [f"--config={config}" for config in configs]
    words += [f"--{key}={as_flag(value)}" for key, value in (settings or {}).items()]
    with flags(flag_of):  # a dotted key is a flag
        return build(decide(read_spec("fit", spelling.check("fit", read(words)))), memory=memory_problem)


def fit(recipe: RunObjects) -> int:
    """Train as the command `fit` does, log and final evaluation included, and return the exit code of that command.

    0: the run is complete. 1: training failed, and the error was printed. 75: a signal stopped training, and a checkpoint is
    saved: load the recipe with ``{"resume": "auto"}`` to continue.

    Raises:
        UserError: The data do not fit the run or its weights, or another process trains in the run folder.
    """
    trainer, spec, log_dir = recipe.trainer, recipe.spec, recipe.spec.log_dir
    if log_dir is not None:
        log_to(log_dir, trainer.global_rank, trainer.world_size)
    if trainer.world_size > 1 and trainer.strategy.root_device.type == "cuda":
        record_collectives(log_dir or spec.run_dir)
    accept, data = spec.config.accept_changes, recipe.datamodule
    return _fit(trainer, recipe.model, data, spec.start, spec.run_dir, initial=spec.initial, accept_changes=accept)


class TrainedModel(nn.Module):
    """The trained model of a run, in fp32 and in eval mode, and the tokenizer of the run.

    Attributes:
        model: the module that was trained: a GPT, or a `CustomModel` whose `network` is the user's module.
        tokenizer: encodes text into ids and decodes ids; None if the data of the run had none.
    """

    def __init__(self, run: str | Path, ckpt_path: str = "last", *, device: str = "auto", ema: bool = False) -> None:
        """Load the trained model and the tokenizer of a run.

        Args:
            run: the run folder.
            ckpt_path: last, best, or the path of a checkpoint.
            device: cpu, cuda, …; auto: a GPU if the machine has one.
            ema: load the average of the weights that EMA kept instead of the weights.

        Raises:
            UserError: The run or the checkpoint does not exist, or files of it are damaged or do not fit together.
        """
        super().__init__()
        self._run = folder = expanded(str(run))
        checkpoint = named_checkpoint(folder, ckpt_path)
        self._saved = SavedRun.read(checkpoint)
        self.tokenizer = self._saved.tokenizer(folder)
        self.model = load_model(checkpoint, chosen_device(device), average=ema)
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, T, V) of ids (B, T). The ids may have any integer dtype, also the uint8 or uint16 of a tokenizer's ids."""
        return self.model(input_ids.long())

    def generate(self, prompt: str, *, max_new_tokens: int = 200, sampling: Sampling | None = None) -> str:
        """Return one text: the prompt followed by its continuation of at most `max_new_tokens` tokens.

        `sampling`: a `lit_llm.Sampling(temperature=…, top_k=…, top_p=…, seed=…)`. None: the defaults of that class.

        Raises:
            UserError: The run has no tokenizer.
        """
        if self.tokenizer is None:
            raise no_tokenizer(self._run)
        ids = prompt_ids(self.tokenizer, prompt, prefix=self._saved.prompt_start)
        stop = end_id(self.tokenizer, self.model.config)
        size = self.tokenizer.vocab_size
        new = generate(self.model, ids, max_new_tokens=max_new_tokens, sampling=sampling, stop_id=stop, vocab_size=size)
        return prompt + self.tokenizer.decode(list(new))
