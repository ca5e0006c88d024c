"""Child processes, forks, sockets and HTTP: what touches the operating system."""
