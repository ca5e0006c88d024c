"""Being here, it lets the tests of both backbones import this folder's helpers."""
