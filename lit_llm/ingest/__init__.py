"""From files of text to token shards: formats, splits, and a pipeline that can be interrupted. No torch."""
