"""The page of finished and running runs: `python -m lit_llm report`."""
