"""Integrations with training frameworks and experiment trackers, one file per tool."""
