"""`python -m verbund` is the command `verbund`."""

from verbund.cli import main

main()
