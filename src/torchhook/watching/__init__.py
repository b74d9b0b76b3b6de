"""Collecting, while a model trains, what the chosen rules need and no more."""
