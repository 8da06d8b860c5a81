"""What refuses and what poses: wrappers, overrides, stand-ins. No step needs it."""
