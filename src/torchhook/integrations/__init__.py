"""One file for each tool that torchhook works with."""
