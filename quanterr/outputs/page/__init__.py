"""Views as HTML pages that work offline."""
