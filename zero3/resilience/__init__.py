"""What lets training go on when a rank's micro-batch fails."""
