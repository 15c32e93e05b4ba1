"""RDMA for asyncio, uvloop and trio."""
