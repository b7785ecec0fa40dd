"""What Slurm reports: pure functions that parse its output, and the only subprocess calls to Slurm."""
