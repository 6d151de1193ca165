"""`python -m statescan.conformance` is `statescan`."""

from statescan.conformance.cli import main

main()
