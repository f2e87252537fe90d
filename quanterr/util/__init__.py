"""General helpers that every room uses: text, strict JSON, TOML files, processes, platform differences."""
