"""Calibrated coefficients of the planner's models, one file a model: see `base`."""
