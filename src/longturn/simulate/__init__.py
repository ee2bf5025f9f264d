"""Longturn without its devices: platforms, a calibrated cost model, and the points it is judged by."""
