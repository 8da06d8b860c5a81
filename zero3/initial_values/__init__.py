"""First values for a model without any: layers one by one, and what is in no layer."""
