"""A real multi-node Slurm cluster on one machine: see docs/sandbox.md."""
