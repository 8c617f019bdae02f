import re

from foreign import fit
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from lit_llm.callbacks import TensorBoardPage


def read_layout(folder):
    events = EventAccumulator(str(folder)).Reload()
    content = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    layout = layout_pb2.Layout()
    layout.ParseFromString(content)
    return layout


def test_one_page_shows_exactly_the_contract_metrics(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    fit([TensorBoardPage()], tmp_path, logger=logger)
    logger.finalize("success")
    (category,) = read_layout(tmp_path).category
    names = [
        *("train/loss", "train/perplexity", "val/loss", "val/perplexity", "lr", "lr/embedding", "grad/norm"),
        *("grad/norm_clipped", "grad/clip_fraction", "throughput/tokens_per_second", "throughput/mfu"),
    ]
    # TensorBoard draws every scalar that a pattern matches from its beginning (custom_scalars_plugin: regex.match).
    shown = {
        chart.title: [name for name in names if any(re.match(tag, name) for tag in chart.multiline.tag)]
        for chart in category.chart
    }
    assert shown == {
        "loss": ["train/loss", "val/loss"],
        "learning rate": ["lr", "lr/embedding"],
        "gradient norm": ["grad/norm", "grad/norm_clipped"],
        "throughput (tokens/s)": ["throughput/tokens_per_second"],
    }


def test_without_tensorboard_nothing_happens(tmp_path):
    assert fit([TensorBoardPage()], tmp_path)[2] == {}
