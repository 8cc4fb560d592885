"""A lab of hosts: `with Lab(hosts=4, rate="100mbit") as lab: lab.run(0, ["command"])`."""

from lab.network import Lab, missing

__all__ = ["Lab", "missing"]
