"""Several ranks: who they are, what they exchange, and whose tokens lie where."""
