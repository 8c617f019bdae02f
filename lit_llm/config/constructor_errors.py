"""Which exceptions of a constructor are a user's mistake, and which are a bug of lit_llm."""

from __future__ import annotations

from lit_llm.core.errors import UserError


def is_mistake(error: Exception) -> bool:
    """Whether an exception caught while an object of the recipe was built can be reported without its traceback.

    lit_llm raises `UserError` for mistakes. The constructors of torch, Lightning and of users' classes raise ValueError and
    others. Those count as mistakes too, unless code of lit_llm was running: then it can be a bug.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:  # jsonargparse wraps errors of constructors
        chain.append(cause)
    return any(isinstance(each, UserError) for each in chain) or not any(_ran_lit_llm(each) for each in chain)


def _ran_lit_llm(error: BaseException) -> bool:
    """Whether code of lit_llm, other than the command line's own, was running when the error was raised."""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module.startswith("lit_llm.") and not module.startswith("lit_llm.config."):
            return True
        trace = trace.tb_next
    return False
