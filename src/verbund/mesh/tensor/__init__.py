"""The axis `tensor`: each worker computes a share of every large operation, on the same samples."""
