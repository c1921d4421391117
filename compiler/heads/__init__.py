"""Trained heads: what a checkpoint of them is, their graphs, and their training. See docs/heads.md."""
