"""Look at a run while it goes on: in the terminal, and as its report in a browser."""
