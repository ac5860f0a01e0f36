"""Slow reference implementations of the KV cache methods, written from the papers' equations in plain loops.

They share no code with kv/ beyond the sizes in `Plan`, and attend by one function, `attention.attend`. All arithmetic
is fp64 (a quantizer's is that of an fp32 implementation, so that codes can be compared bit by bit); outputs and stored
vectors are returned as fp32, sizes are exact integers. A reference holds one batch row; none knows a sliding window.
Ties go to the lowest position.
"""
