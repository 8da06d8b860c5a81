"""Construction: the one room that picks what a layer is made of, as its policy says."""
