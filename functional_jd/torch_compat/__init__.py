"""Work around limits of torch."""
