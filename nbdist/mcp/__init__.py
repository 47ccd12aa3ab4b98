"""Serves a kept cluster to assistants and scripts, by the Model Context Protocol.

`python -m nbdist.mcp` runs it. It needs `nbdist[mcp]`.
"""
