"""Weights in and out: folders as the `transformers` library reads and writes them, without that library."""
