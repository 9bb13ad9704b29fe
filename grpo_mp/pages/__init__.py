"""Pages of Markdown that are filled from the code, so that they say what it does."""
