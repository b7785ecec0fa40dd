"""On an allocated node: from a Slurm task to the processes of the job. Standard library only."""
