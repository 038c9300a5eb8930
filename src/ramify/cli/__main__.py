"""`python -m ramify.cli`."""

from ramify.cli import main

main()
