"""Commands of a checkout: tiny models and tasks, and the generated pages."""
