"""The quickstart's problem, tokenizer, tiny models and supervised cold start; only `grpo-mp make-tiny` uses them."""
