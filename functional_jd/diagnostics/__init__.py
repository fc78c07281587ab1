"""What the objectives do to one another."""
