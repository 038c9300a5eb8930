"""`python -m ramify` is the `ramify` command."""

from ramify.cli import main

if __name__ == "__main__":
    main()
