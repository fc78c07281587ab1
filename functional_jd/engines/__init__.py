"""From losses to a direction: Jacobian, Gramian, weighted pass, and the choice between them."""
