"""What an agent may call: see `tool`."""
