"""Where chunks rest if it is not where their layers compute."""
