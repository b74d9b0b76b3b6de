"""torchhook inside of other tools; each file needs the tool that it is for."""
