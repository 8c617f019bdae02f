"""Small modules that all parts of lit_llm use. These modules import only each other and `lit_llm.callbacks` from lit_llm."""
