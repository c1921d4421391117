"""`mlsdc view`: dumps, artifacts, graphs and traces as one self-contained HTML page."""
