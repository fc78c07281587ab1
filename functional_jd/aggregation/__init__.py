"""The protocol of aggregation rules, their views, lifts from plain functions, and helpers that rules share."""
