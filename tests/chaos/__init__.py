"""Faults by a seed, and tools that make them."""
