"""How islands combine what they learn: see `docs/architecture.md`."""
