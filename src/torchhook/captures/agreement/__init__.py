"""Run two models on one batch and tell rounding from a real difference; start at `paired_runs.PairedRuns`."""
