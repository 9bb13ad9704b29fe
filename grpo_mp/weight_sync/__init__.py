"""Weight sync: sends the policy's weights to every engine in buckets of bounded size, and checks the result."""
