"""Triton operators: each with the bits of a row its own, as on the CPU, and plain torch beside it.

Only the CUDA path imports this package. Three habits keep a row's bits from depending on its
mates: sizes that a batch changes are never specialised, tile shapes and warps follow from the
model's dimensions (or are known to give equal bits), and no multiply is fused with an add behind
our back (``enable_fp_fusion=False`` at every launch).
"""
