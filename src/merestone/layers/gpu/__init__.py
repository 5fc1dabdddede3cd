"""The layers on a GPU: the weights and fields of their CPU counterparts, over static tables."""
