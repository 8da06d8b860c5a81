"""zero3 inside other libraries. Each file is imported on demand, and needs the library that it is
named after.
"""
