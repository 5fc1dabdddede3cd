"""Where deciding meets doing: the loop that plans, runs and reports."""
