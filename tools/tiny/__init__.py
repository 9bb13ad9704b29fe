"""Tiny models, their tasks and the quickstart's cold start: `python -m tools.tiny.make` makes them."""
