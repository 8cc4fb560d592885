"""A model's initial values without ever holding the model whole: record the constructor, then replay it."""

from verbund.mesh.initial.record import Recorded, record
from verbund.mesh.initial.tape import NotRecordable

__all__ = ["NotRecordable", "Recorded", "record"]
