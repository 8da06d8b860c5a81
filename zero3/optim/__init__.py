"""What happens between backward and the next forward."""
