"""Sizes of temporary buffers. The code that allocates them and the planner that counts them share these numbers."""

MUON_BATCH_NUMEL = 2**24
"""Elements of the matrices that Muon orthogonalises together (and Lion updates together)."""

SOFTMAX_NUMEL = 2**23
"""Logits that the chunked loss holds in the sum's dtype at a time (32 MiB in float32)."""
