import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from foreign import Foreign, fit
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.callbacks import TextSamples
from lit_llm.callbacks.samples import log_text, tags_of, takes_text


class Writer(Foreign):
    """Draws from every global random generator."""

    def __init__(self, steps=8, whole=False, **kwargs):
        super().__init__(steps=steps, **kwargs)
        self.drop.p = 0.5
        self.drop.eval()  # frozen on purpose: must be in eval mode afterwards, too
        self.whole, self.calls = whole, []

    def generate_text(self, prompt, *, max_new_tokens, temperature, top_k, top_p, seed):
        assert not any(m.training for m in self.modules()) and not torch.is_grad_enabled()
        self.calls.append((self.trainer.global_step, prompt, max_new_tokens, temperature, top_k, top_p, seed))
        np.random.rand(), random.random()
        text = f" continued {torch.rand(1).item():.0f}\n  * as # Markdown\n"
        return prompt + text if self.whole else text


def texts(folder):
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["tensors"]
    return {tag: {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)} for tag in tags}


def run(tmp_path, module, *callbacks, **kwargs):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer, _, _ = fit(list(callbacks), tmp_path, module=module, logger=logger, **kwargs)
    logger.finalize("success")
    return trainer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_samples_are_written_at_due_steps_and_at_the_end(tmp_path, accumulate):
    module = Writer()
    callback = TextSamples(["def ", "class "], every_n_steps=3, max_new_tokens=7, temperature=0.5, top_k=None, seed=4)
    run(tmp_path, module, callback, accumulate_grad_batches=accumulate)
    expected = [(step, prompt, 7, 0.5, None, None, 4) for step in (3, 6, 8) for prompt in ("def ", "class ")]
    assert module.calls == expected
    written = texts(tmp_path)
    assert list(written["samples/def/text_summary"]) == list(written["samples/class/text_summary"]) == [3, 6, 8]


@pytest.mark.parametrize("whole", [True, False])
def test_prompt_and_continuation_are_one_block_with_its_white_space(tmp_path, whole):
    run(tmp_path, Writer(whole=whole), TextSamples(["def "], every_n_steps=8))
    text = texts(tmp_path)["samples/def/text_summary"][8]
    assert text.startswith("    def  continued ")
    assert text.split("\n")[1:] == ["      * as # Markdown", "    "]


def test_tags_are_readable_valid_and_distinct():
    prompts = ["def ", "def-2", "def", "def", "class Foo(x):", "", "../..", "héllo\nwörld", "x" * 60]
    assert [tag.removeprefix("samples/") for tag in tags_of(prompts)] == [
        *("def", "def-2", "def-3", "def-4", "class-Foo-x", "prompt", "prompt-2", "héllo-wörld"),
        "x" * 40,
    ]


def test_each_logger_gets_text_in_its_way_and_others_get_none(tmp_path):
    """Objects of the real classes, without their packages; tests/training/test_other_loggers.py has the packages."""
    calls = []
    wandb = object.__new__(type("Table", (WandbLogger,), {"log_text": lambda self, key, **kwargs: calls.append((key, kwargs))}))
    client = SimpleNamespace(log_text=lambda *arguments: calls.append(arguments))
    mlflow = object.__new__(type("Client", (MLFlowLogger,), {"experiment": client, "run_id": "7"}))
    for logger in (wandb, mlflow, CSVLogger(tmp_path)):
        log_text(logger, "samples/a", "b", 3)
    table = ("samples/a", {"columns": ["step", "text"], "data": [["3", "b"]], "step": 3})
    assert calls == [table, ("7", "b", "samples/a/step-00000003.txt")]
    assert takes_text(wandb) and takes_text(mlflow) and not takes_text(CSVLogger(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    client.log_text = full
    with pytest.warns(UserWarning, match="cannot write the text samples/a of step 3: No space left on device"):
        log_text(mlflow, "samples/a", "b", 3)


def test_other_loggers_get_no_text_and_nothing_is_generated_for_them(tmp_path):
    module = Writer()
    _, _, rows = fit([TextSamples(["x"], every_n_steps=1)], tmp_path, module=module)
    assert rows == {} and module.calls == []


def test_a_module_that_cannot_generate_is_refused_before_training(tmp_path):
    module = Foreign()
    with pytest.raises(ValueError, match="needs a method generate_text, which Foreign does not have"):
        fit([TextSamples(["x"], every_n_steps=1)], tmp_path, module=module)
    assert module.seen == []
