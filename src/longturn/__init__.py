"""Longturn: an engine that serves large language models to agents."""
