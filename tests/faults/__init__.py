"""Faults injected into jobs on real nodes: `make test-faults`. The short ones also run in `make test`."""
