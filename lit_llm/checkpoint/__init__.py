"""Checkpoints on disk: their format, and how Lightning saves and loads them."""
