"""Plain data and errors that every room uses. It imports no other package of ajet and no heavy library."""

__version__ = "0.1.0"
