"""Compressed sums of gradients, with error feedback (Seide and others, "1-bit stochastic gradient descent", 2014;
Karimireddy and others, "Error feedback fixes SignSGD", 2019).

`sums` says how compressed sums are used; `coded_sums` are those of anything that a `Codec` makes bytes of, `power_sgd`
those of low rank.
"""
