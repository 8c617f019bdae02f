"""From documents to fewer and better documents: normalise, filter, remove duplicates. No torch."""
