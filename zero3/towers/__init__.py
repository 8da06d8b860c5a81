"""Parts of a model that not every rank calls, such as a vision tower."""
