"""On the login node: from a configuration to a job. Runs without torch."""
