"""The parts of an optimizer's step: groups by name, whole parameters, clipping, norms, loss
scaling.
"""
