"""What a run shows: metrics, timeline, progress, sampled answers; and the watchdog over every wait."""
