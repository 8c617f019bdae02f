"""Models, their losses and text generation."""
