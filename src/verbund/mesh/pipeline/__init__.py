"""Pipeline parallelism: consecutive layers on different workers, micro-batches flowing through them."""
