"""Metrics, timeline, progress, samples, warnings and reports of a run; and its watchdog."""
