"""What workers of a mesh that divides the model need besides: torch's meta device imports its compiler at the first
operation, which takes over a second."""

import torch
from torch.nn import functional

functional.layer_norm(torch.empty(2, 4, device="meta"), (4,))
