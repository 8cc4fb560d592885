"""Models, data and settings of other systems."""
