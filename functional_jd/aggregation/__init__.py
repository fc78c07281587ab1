"""What is a rule? The protocol, the views, lifts, and what rules share."""
