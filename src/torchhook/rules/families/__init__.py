"""The rules themselves, one family a file."""
