"""Clean documents before tokenisation: normalise text, filter documents, remove duplicates. No torch."""
