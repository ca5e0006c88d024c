"""The hardened front that every server of ours stands on: connections, deadlines, sizes, keys."""
