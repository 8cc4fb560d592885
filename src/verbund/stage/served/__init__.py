"""Training with parameter servers: the processes of a run besides its workers, and what its workers do otherwise."""
