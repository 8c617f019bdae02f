"""Parallelism, activation checkpointing, compilation and float8."""
