"""The LightningModule, and training as a command."""
