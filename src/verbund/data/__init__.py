"""Data: sources, their conversion to column files, the order of samples, and the loader that reads them.

`prepare` and what it imports never import torch; only `dataset` and `loader` do.
"""
