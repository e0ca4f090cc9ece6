"""One step, one task, one run."""
