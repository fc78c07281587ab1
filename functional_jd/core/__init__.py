"""What is a value? Names of values, pytrees, rows, representations; torch's private names."""
