"""The web page over experiment folders. Reads what a run wrote; changes nothing."""
