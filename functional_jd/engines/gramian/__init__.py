"""How the Gramian of a layer is found without its rows."""
