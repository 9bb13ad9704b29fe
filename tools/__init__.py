"""Commands for developers with a checkout: smoke test, tiny models and tasks, generated pages."""
