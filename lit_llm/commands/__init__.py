"""The commands of `python -m lit_llm`, one module each, and modules that several commands share."""
