"""Small modules that every room uses. They import nothing of lit_llm but each other and callbacks."""
