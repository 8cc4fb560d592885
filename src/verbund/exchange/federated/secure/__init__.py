"""Secure aggregation: a server learns the sum of its clients' vectors, and nothing else of them.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017 (the variant
against a server that cheats, figure 4), with the neighbours of Bell et al., "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead", CCS 2020 (the variant in which each client draws its own, section 4). `Client` and `Server`
take and give messages; who carries these is not their business.
"""

from verbund.exchange.federated.secure.client import Client
from verbund.exchange.federated.secure.failure import ClientCheated, ServerCheated, TooFewClients
from verbund.exchange.federated.secure.fixed_point import FixedPoint, as_words
from verbund.exchange.federated.secure.identity import Identity, pinned
from verbund.exchange.federated.secure.layout import Layout
from verbund.exchange.federated.secure.masks import Masks, whole
from verbund.exchange.federated.secure.messages import Sent
from verbund.exchange.federated.secure.server import Server, Sum
from verbund.exchange.federated.secure.terms import Round, Terms

__all__ = [
    "Client",
    "ClientCheated",
    "FixedPoint",
    "Identity",
    "Layout",
    "Masks",
    "Round",
    "Sent",
    "Server",
    "ServerCheated",
    "Sum",
    "Terms",
    "TooFewClients",
    "as_words",
    "pinned",
    "whole",
]
