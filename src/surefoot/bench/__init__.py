"""Measuring a model: first that no drafter changes a token, then what a step costs and how fast each drafter is."""
