"""The quickstart's problem, tokenizer and tiny models, and its supervised cold start. Nothing else needs them."""
