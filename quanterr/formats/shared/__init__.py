"""What several formats have in common: element types, packings, grids of scales, labels."""
