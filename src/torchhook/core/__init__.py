"""The engine: select ▸ tap ▸ session ▸ hooks. Needs torch alone."""
