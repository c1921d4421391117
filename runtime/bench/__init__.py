"""Measurements of the runtime: `python -m mlsdc.runtime.bench.<name>`."""
