"""The net of pairs: every capability lives with every other one, and plain torch in one process says what should come of it."""
