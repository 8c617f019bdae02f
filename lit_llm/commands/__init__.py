"""One module per command of `python -m lit_llm`."""
