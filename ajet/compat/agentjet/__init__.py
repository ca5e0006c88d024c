"""Names that files of older versions import, bound to our own parts."""
