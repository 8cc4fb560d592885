from verbund.exchange.parameter_server.plan import Plan


def place(plan: Plan, servers: int, replicas: int) -> list[tuple[int, ...]]:
    return [tuple((n + k) % servers for k in range(replicas + 1)) for n in range(len(plan.blocks))]
