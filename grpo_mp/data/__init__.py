"""Prompt sets, chat data sets, chat templates, and the order in which prompts are drawn."""
