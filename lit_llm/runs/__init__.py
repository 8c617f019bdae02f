"""What the folder of a run is, and how a run continues."""
