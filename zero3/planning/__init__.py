"""plan(): what a training step will hold and how long it will take, found by running the real code
without values.
"""
