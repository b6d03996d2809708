"""Calibrated coefficients of the planner's models, one file per model. See `base`."""
