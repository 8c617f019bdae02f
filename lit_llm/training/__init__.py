"""The LightningModule that trains a model, its objectives, and what the commands `fit`, `check` and `find-lr` do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing them imports torch; `lit_llm.config.spelling` reads where the classes of `objective` are
    from lit_llm.training.distillation import Distillation as Distillation
    from lit_llm.training.objective import CrossEntropy as CrossEntropy
    from lit_llm.training.preference import Preference as Preference
