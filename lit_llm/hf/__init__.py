"""Hugging Face folders: configurations, weights and tokenizers."""
