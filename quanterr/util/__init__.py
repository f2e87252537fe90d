"""General helpers for all packages: text, strict JSON, TOML files, processes, platform differences."""
