import re

import pytest
from foreign import Batches, Foreign, fit, make_trainer
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.data import DataLoader

from lit_llm.callbacks import TensorBoardPage


def read_layout(folder):
    events = EventAccumulator(str(folder)).Reload()
    content = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    layout = layout_pb2.Layout()
    layout.ParseFromString(content)
    return layout


class TwoSources(LightningDataModule):
    """That of another project, which names the sources of its rows."""

    source_names = ("web", "code")

    def train_dataloader(self):
        return DataLoader(Batches(1), batch_size=None)


@pytest.mark.parametrize("by_source", [False, True], ids=["one text", "two sources"])
def test_one_page_shows_exactly_the_contract_metrics(tmp_path, by_source):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = make_trainer([TensorBoardPage()], tmp_path, steps=1, logger=logger)
    trainer.fit(Foreign(steps=1), datamodule=TwoSources() if by_source else None)
    logger.finalize("success")
    categories = read_layout(tmp_path).category
    assert [category.title for category in categories] == ["quality", "health", "speed"]
    names = [
        *("train/loss", "train/perplexity", "val/loss", "val/perplexity", "lr", "lr/embedding", "grad/norm"),
        *("train/web/loss", "train/code/loss", "val/web/loss", "val/web/perplexity"),
        *("grad/norm_clipped", "grad/clip_fraction", "throughput/tokens_per_second", "throughput/mfu", "val/bits_per_byte"),
        *(
            "time/data_fraction",
            "time/forward_fraction",
            "memory/peak_gb",
            "plan/peak_gb",
            "plan/memory_ratio",
            "spike/skipped",
        ),
        *("health/update_ratio/head", "health/attention_logit_max/blocks.0", "health/activation_rms/blocks.0"),
        *("health/output_entropy", "health/update_norm/head", "val/gzip_bits_per_byte"),
    ]
    # TensorBoard draws every scalar that a pattern matches from its beginning (custom_scalars_plugin: regex.match).
    shown = {
        chart.title: [name for name in names if any(re.match(tag, name) for tag in chart.multiline.tag)]
        for category in categories
        for chart in category.chart
    }
    sources = {
        "training loss by source": ["train/web/loss", "train/code/loss"],
        "validation loss by source": ["val/web/loss"],
    }
    assert shown == (sources if by_source else {}) | {
        "training loss": ["train/loss"],
        "validation loss": ["val/loss"],
        "bits per byte": ["val/bits_per_byte", "val/gzip_bits_per_byte"],
        "learning rate": ["lr", "lr/embedding"],
        "gradient norm": ["grad/norm", "grad/norm_clipped"],
        "fraction of steps clipped": ["grad/clip_fraction"],
        "skipped steps": ["spike/skipped"],
        "update norm / weight norm": ["health/update_ratio/head"],
        "largest attention logit": ["health/attention_logit_max/blocks.0"],
        "root mean square of activations": ["health/activation_rms/blocks.0"],
        "entropy of the output (nats)": ["health/output_entropy"],
        "throughput (tokens/s)": ["throughput/tokens_per_second"],
        "fractions of the time": ["time/data_fraction", "time/forward_fraction"],
        "peak memory (GB)": ["memory/peak_gb", "plan/peak_gb"],
    }


def test_without_tensorboard_nothing_happens(tmp_path):
    assert fit([TensorBoardPage()], tmp_path)[2] == {}
