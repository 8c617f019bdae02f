"""Small modules that all parts of lit_llm use. They import nothing of lit_llm but each other and `lit_llm.callbacks`."""
