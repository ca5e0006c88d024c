"""SGLang as the engine, through a server that is already running. Experimental: see `engine`."""
