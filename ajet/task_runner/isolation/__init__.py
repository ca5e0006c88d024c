"""`wrapper_type: multi-processing`: each episode's workflow and judge in a process of their own.

`server.py` is a small process that imports the user's code once and forks a worker for each episode; it has never seen
torch, has one thread, and holds no model. `worker.py` is what a worker does. `venue.py` is the side of the process that
runs the episodes. Model calls go through the gateway; task, reward and metadata cross as JSON; nothing else does.
"""
