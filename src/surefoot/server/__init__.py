"""The HTTP server, and what it makes of text."""
