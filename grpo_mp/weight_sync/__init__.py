"""Weights out of the policy's layout into every engine, in buckets of bounded size, with a version, checked."""
