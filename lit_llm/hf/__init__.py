"""Reads and writes Hugging Face folders (configuration, weights), GGUF files, and adapters of the package peft."""
