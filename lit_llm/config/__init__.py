"""From a recipe and flags to a model, data and a Trainer."""
