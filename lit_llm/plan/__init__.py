"""Compute the memory, FLOPs, communication, time and cost of a training run from the run's settings, before the run starts.

Memory and executed FLOPs come from a trace of the model. The first plan imports torch for this trace.

>>> from lit_llm.models.config import GPTConfig
>>> from lit_llm.plan import total_parameters
>>> total_parameters(GPTConfig(n_layer=4, n_head=4, n_embd=256, vocab_size=2048))
4197120
"""

from lit_llm.core.hardware import Hardware, find, table
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.plan.memory import Memory, peak_memory
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.plan import Plan, as_dict, make_plan
from lit_llm.plan.planned_run import DataFacts, PlannedRun
from lit_llm.plan.speed import Options
from lit_llm.plan.weights import parameters, total_parameters

__all__ = [
    "DataFacts",
    "Hardware",
    "Layout",
    "Memory",
    "Optimizer",
    "Options",
    "Plan",
    "PlannedRun",
    "as_dict",
    "find",
    "make_plan",
    "parameters",
    "peak_memory",
    "table",
    "total_parameters",
]
