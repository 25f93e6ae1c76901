"""The kernel library: hand-scheduled loop-IR kernels, each with one definition of its value.

`registry` lists what computes which primitive; a module's docstring gives formulas, its builders' docstrings the
parameters in order.  A builder is a cached function of what a kernel is specialised for (types, head sizes, flags);
lengths are arguments.  `fused` builds elementwise chains and row reductions, `lowering` turns tensor-IR nodes into
launches, `layout` holds the weight layouts.
"""
