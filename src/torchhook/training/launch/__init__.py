"""`torchhook run`: start a script, find its model and optimizer, watch them."""
