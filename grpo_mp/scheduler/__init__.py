"""Phases of a step: who is awake on the device, what is resident, what it costs in memory."""
