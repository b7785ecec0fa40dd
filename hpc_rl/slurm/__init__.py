"""What Slurm says: parsing as pure functions on text, and the only subprocess calls to Slurm."""
