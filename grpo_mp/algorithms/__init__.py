"""The GRPO family as independent pure functions: advantages, ratios, losses, aggregation and KL."""
