"""Differential privacy: clipping, noise, and an account of what every release costs."""

from verbund.exchange.federated.privacy.accountant import Accountant, BudgetSpent, Spent
from verbund.exchange.federated.privacy.central import CentralPrivacy
from verbund.exchange.federated.privacy.clipping import clipped
from verbund.exchange.federated.privacy.distributed import DistributedPrivacy
from verbund.exchange.federated.privacy.event import Event
from verbund.exchange.federated.privacy.example_accounts import ExampleAccounts
from verbund.exchange.federated.privacy.examples import ExamplePrivacy
from verbund.exchange.federated.privacy.local import LocalPrivacy

__all__ = [
    "Accountant",
    "BudgetSpent",
    "CentralPrivacy",
    "DistributedPrivacy",
    "Event",
    "ExampleAccounts",
    "ExamplePrivacy",
    "LocalPrivacy",
    "Spent",
    "clipped",
]
