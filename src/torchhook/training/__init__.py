"""Watch a training and keep its run: the monitor, the launcher, runs on disk, logs."""
