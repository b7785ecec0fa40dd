"""Entries on an allocated node: they start the processes of the job from a Slurm task. Standard library only."""
