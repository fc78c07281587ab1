"""The training state, the step and the loop around it."""
