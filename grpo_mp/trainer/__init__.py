"""Parts of the training loop: start and end of a job, a step's rollouts, logprobs, updates, metrics, saves."""
