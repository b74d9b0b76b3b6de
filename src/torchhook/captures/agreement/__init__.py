"""Run two models side by side, and tell rounding from a mistake."""
