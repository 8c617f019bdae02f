"""The exception for settings that cannot work."""


class ConfigurationError(ValueError):
    """An argument of a callback, or a setting of the Trainer or the module, cannot work with it.

    The message names the value, the rule, and the flag of `python -m lit_llm` that mends it.
    """
