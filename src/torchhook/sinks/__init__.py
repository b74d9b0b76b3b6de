"""Where events go: into memory."""
