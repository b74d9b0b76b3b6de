"""Recordings: what flowed in a run of a model, on disk."""
