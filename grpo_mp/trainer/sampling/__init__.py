"""Sampling of answers without training: rounds of generation, filters, Parquet file, summary."""
