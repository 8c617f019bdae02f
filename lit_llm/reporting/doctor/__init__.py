"""`doctor`: rules that find mistakes in a run's settings, data, losses, gradients and speed from its logged curves."""
