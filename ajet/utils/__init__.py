"""Names that old files import from `ajet.utils`, bound to our own parts."""
