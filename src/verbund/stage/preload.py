"""What workers need, imported once in the warm server so that every fork has it."""

import numpy.random
import torch.utils.checkpoint

import verbund.stage.federated.simulate
import verbund.stage.predict
import verbund.stage.preflight
import verbund.stage.train
import verbund.stage.validate
