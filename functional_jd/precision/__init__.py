"""In which dtype? Op tables, autocast, policies, custom functions, loss scaling."""
