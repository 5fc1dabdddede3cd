"""Operators: tensors in, tensors out, and every row's bits its own."""
