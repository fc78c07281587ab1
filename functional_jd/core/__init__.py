"""Names of values, pytrees, rows, representations, and agreement of ranks."""
