"""Recipes for training language models with PyTorch Lightning."""
