"""Reads and writes checkpoints: their format on disk, and the CheckpointIO by which Lightning saves and loads them."""
