"""Measures what an optimizer does to parameters: their values, gradients and updates."""
