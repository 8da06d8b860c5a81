"""Communication between ranks: collectives, their order on a device, and their errors. Nothing here
knows about parameters.
"""
