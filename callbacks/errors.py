"""The exception for a user's mistake."""


class UserError(ValueError):
    """A mistake in the input: one sentence a line, each with the value, the rule, and the flag or key that mends it.

    A callback raises it for an argument that is invalid, or a setting of the Trainer or the module that conflicts with it.
    `python -m lit_llm` prints it without a traceback and exits with code 2. Any other exception is a bug and keeps its
    traceback.
    """
