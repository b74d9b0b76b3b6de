"""`torchhook.diff`: the first module where two models diverge."""
