"""What must be done because torch is as it is."""
