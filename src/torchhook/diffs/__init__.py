"""How `torchhook.diff` tells rounding from a mistake: run, match, hand values on, judge, tell."""
