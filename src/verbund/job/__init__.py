"""The job: what to train, on what, how it is divided, and where it runs.

A job is a TOML file or the same frozen objects in Python. Unknown keys are refused with the nearest known one,
and all problems are reported at once. Every default of the product stands here, each section in a file of its name.
"""

from __future__ import annotations

from verbund.job.arguments import parse_changes, parse_cluster, parse_strategy, parse_value
from verbund.job.checkpoint import Checkpoint
from verbund.job.cluster import Cluster
from verbund.job.compression import CASTS, Compression
from verbund.job.data import Data
from verbund.job.exchange import Exchange
from verbund.job.federated import Partition, Rule
from verbund.job.federated_privacy import Privacy, Secure
from verbund.job.federated_round import Round
from verbund.job.job import Job
from verbund.job.observe import Observe
from verbund.job.optimizer import Group, Optimizer, Schedule
from verbund.job.section import Section
from verbund.job.stragglers import Stragglers
from verbund.job.strategy import AXES, Strategy
from verbund.job.train import Objective, Patience, Target, Train
from verbund.job.validate import Validate

__all__ = [
    "AXES",
    "CASTS",
    "Checkpoint",
    "Cluster",
    "Compression",
    "Data",
    "Exchange",
    "Group",
    "Job",
    "Objective",
    "Observe",
    "Optimizer",
    "Partition",
    "Patience",
    "Privacy",
    "Round",
    "Rule",
    "Schedule",
    "Section",
    "Secure",
    "Stragglers",
    "Strategy",
    "Target",
    "Train",
    "Validate",
    "parse_changes",
    "parse_cluster",
    "parse_strategy",
    "parse_value",
]
