"""What not every model has: stages of a gradient's way, an order of calls that is not learned."""
