"""Bytes between ranks: collectives, their order on a device, and what their failures are called. Knows no parameters."""
