"""Post-training of language models on a Slurm cluster."""

__version__ = "0.1.0"
