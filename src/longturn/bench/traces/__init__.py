"""Recorded agent traces: reading the public formats into one form, splitting agents, counting what is in them."""
