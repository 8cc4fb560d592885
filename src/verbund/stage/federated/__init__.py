"""Federated learning as a stage: a server that holds rounds, and clients whose data stay with them."""
