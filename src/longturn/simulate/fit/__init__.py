"""Fitting the constants of the cost model to measured kernel tables."""
