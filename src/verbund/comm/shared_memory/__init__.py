"""Collectives between the processes of one host, through memory that they share.

Each process has an arena, memory that its neighbours map too. A collective costs one or two flags and copies at the
speed of the cache; sums are taken in the order of the ranks, so that they are equal bit for bit on all of them and
from run to run. `identity` says who shares a host, `host` lets them meet, `channel` keeps the flags, `operations` and
`reduction` are the collectives themselves, and `progress` waits.
"""
