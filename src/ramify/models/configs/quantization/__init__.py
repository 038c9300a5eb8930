"""What a `config.json` says of its quantised linear layers: a scheme for each module."""
