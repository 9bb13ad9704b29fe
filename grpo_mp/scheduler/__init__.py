"""Phase changes: what is on the device in a phase, how long it takes, and what it costs in memory."""
