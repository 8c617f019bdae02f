"""Sizes of temporary buffers. The code that allocates them and the planner that counts them share these numbers."""

KEPT_WHOLE_SHARE = 1 / 8
"""Share of a device's memory up to which FSDP2 keeps whole weights, or whole gradients, where a setting is auto."""

MUON_BATCH_NUMEL = 2**24
"""Elements of the matrices that a rank orthogonalises in one turn of Muon (and that Lion updates together)."""

SOFTMAX_NUMEL = 2**23
"""Logits that the chunked loss holds in the sum's dtype at a time (32 MiB in float32)."""
