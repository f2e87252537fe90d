"""Building blocks that several formats share: element types, packings, scale grids, label checks."""
