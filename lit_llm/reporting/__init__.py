"""HTML pages about runs (`python -m lit_llm report`), plans and learning-rate searches, and the rules of `doctor`."""
