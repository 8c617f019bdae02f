"""A batch ramp, the sizes of its steps counted by hand, and what a run under it logs."""

from lightning.pytorch import Callback
from recorder import T

RAMP = [(0, 2 * T), (5 * T, 8 * T), (20 * T, 12 * T)]  # in samples: 2 a step, 8 once 5 are consumed, 12 once 20 are
SIZES = [2, 2, 2, 8, 8, 12, 12, 12, 12]  # so that 6 and 22 are consumed when the size changes: multiples of neither
BEFORE = [0, 2, 4, 6, 14, 22, 34, 46, 58, 70]


class Rows(Callback):
    """Logged values by optimizer step."""

    def __init__(self):
        self.rows = {}

    def on_train_start(self, trainer, pl_module):
        self.first = trainer.global_step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step not in (0, max(self.rows, default=self.first)):
            keep = ("train/loss", "grad/norm", "lr", "progress/tokens")
            self.rows[trainer.global_step] = {key: float(trainer.callback_metrics[key]) for key in keep}


def weights(module):
    return {name: p.tolist() for name, p in module.model.named_parameters()}
