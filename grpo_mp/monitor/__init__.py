"""Metrics, timeline, progress display, samples, warnings, reports and watchdog of a run."""
