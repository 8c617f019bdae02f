"""The exception for invalid settings."""


class ConfigurationError(ValueError):
    """An argument of a callback is invalid, or a setting of the Trainer or the module conflicts with it.

    The message names the value, the rule, and the flag of `python -m lit_llm` to change.
    """
