"""Answers to prompts without a trainer: rounds of generation, filters, one Parquet file, what became of it all."""
