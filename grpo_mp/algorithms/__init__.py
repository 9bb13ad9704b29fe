"""The GRPO family as independent, pure parts: advantages, ratios, losses, aggregation and KL."""
