"""Model families: one file each, weight names included."""
