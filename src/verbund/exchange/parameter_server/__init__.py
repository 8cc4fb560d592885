"""Parameter servers: server processes hold the parameters, islands pull them and push gradients.

`plan` says which blocks there are, `holdings` what a server has of them and what a push does, `server` and `client`
bring both together over the wire, and the `coordinator` hands out tickets and says who holds what.
"""
