"""Federated learning: what clients do, and all of it in one place as a simulation."""
