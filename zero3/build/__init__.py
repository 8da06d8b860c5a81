"""Construction: the one room that reads the policy and picks what a layer is made of."""
