"""What can be known about a run before it starts, without a GPU."""
