"""The memory, compute, communication, time and cost of a run, computed from its settings without torch.

>>> from lit_llm.plan import ModelShape, total_parameters
>>> total_parameters(ModelShape(48, 25, 1600, 1024, 50257, mlp="gelu", tie_embeddings=True, qk_norm=False, pad_vocab_to=1))
1555126400
"""

from lit_llm.plan.hardware import Hardware, find, table
from lit_llm.plan.json_output import as_dict
from lit_llm.plan.memory import Layout, Memory, memory_per_rank
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.parameters import ModelShape, parameters, total_parameters
from lit_llm.plan.plan import Options, Plan, make_plan
from lit_llm.plan.settings import DataFacts, RunSettings, Schedule

__all__ = [
    "DataFacts",
    "Hardware",
    "Layout",
    "Memory",
    "ModelShape",
    "Optimizer",
    "Options",
    "Plan",
    "RunSettings",
    "Schedule",
    "as_dict",
    "find",
    "make_plan",
    "memory_per_rank",
    "parameters",
    "table",
    "total_parameters",
]
