"""Files of a run's owner for processes whose hosts do not see them, over the wire and by the run's secret.

A `Location` is where a file or folder lies: a path of this host, or a `Remote`, which the owner reads and writes for
whoever asks over a `Line`. `cluster.file_service` is the owner's side.
"""

from verbund.comm.files.line import AHEAD, PART_BYTES, ROLE, Bytes, Line
from verbund.comm.files.location import Location, NewFile, Remote, new_file

__all__ = ["AHEAD", "PART_BYTES", "ROLE", "Bytes", "Line", "Location", "NewFile", "Remote", "new_file"]
