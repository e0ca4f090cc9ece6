"""Results of runs: the accuracy matrix, the figures computed from it, and their storage."""
