"""Sandboxes: files and processes of the policy's programs, apart from this machine."""
