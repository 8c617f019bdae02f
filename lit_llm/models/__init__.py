"""The GPT and custom models, their losses, and text generation."""
