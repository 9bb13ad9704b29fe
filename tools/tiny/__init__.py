"""Tiny models, their tasks, and the cold start of the quickstart; `python -m tools.tiny.make` makes them."""
