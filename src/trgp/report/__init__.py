"""Build tables, figures and a page from stored results alone."""
