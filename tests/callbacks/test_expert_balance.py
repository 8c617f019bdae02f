"""ExpertBalance with a module that is not lit_llm's."""

import pytest
import torch
from foreign import Foreign, fit  # noqa: F401
from lightning.pytorch import Callback

from lit_llm.callbacks import ExpertBalance
from lit_llm.callbacks.errors import UserError
