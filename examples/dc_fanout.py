"""Writes to 64 targets from one pool of DC initiators: no connection to any of them, and one that is broken.

Run it:  python examples/dc_fanout.py
"""

import asyncio
import contextlib

import aiordma
from aiordma import mlx5

TARGETS = 64


async def main() -> None:
    async with contextlib.AsyncExitStack() as stack:
        own = stack.enter_async_context
        device = await own(aiordma.open_device())
        print(f"device: {device.describe()}")

        # The targets. In real life each is a service on another machine; all that it tells the world are its DCTInfo
        # (36 bytes) and the RemoteBuffer of its memory.
        srq = await own(device.create_srq(16))
        mailboxes = [bytearray(32) for _ in range(TARGETS)]
        regions = [await own(device.reg_mr(mailbox)) for mailbox in mailboxes]
        targets = [await own(mlx5.create_dc_target(device, srq)) for _ in range(TARGETS)]
        directory = [(target.info.to_bytes(), region.remote()) for target, region in zip(targets, regions, strict=True)]

        # The sender: two initiators with 16 streams each. What fails on one stream leaves the others alone. The timeout is
        # short, so that the broken target is found out soon: 4.096 us * 2**10, and one more try.
        config = aiordma.QPConfig(timeout=10, retry_cnt=1)
        pool = await own(mlx5.create_dci_pool(device, 2, log_streams=4, log_errored=3, config=config))
        peers = [await own(pool.reach(mlx5.DCTInfo.from_bytes(info))) for info, _ in directory]

        news = await own(device.reg_mr(bytearray(b"the same news for everyone"), aiordma.Access.NONE))
        writes = [pool.rdma_write(peer, news, remote) for peer, (_, remote) in zip(peers, directory, strict=True)]
        for write in writes:
            await write
        print(f"all {TARGETS} have it: {all(mailbox.startswith(b'the same news') for mailbox in mailboxes)}")

        # One target restarted and has another key now.
        info = mlx5.DCTInfo.from_bytes(directory[13][0])
        peers[13] = await own(pool.reach(mlx5.DCTInfo(info.dctn, info.dc_key ^ 1, info.gid, info.gid_type)))
        results = await asyncio.gather(
            *(
                pool.rdma_write(peer, b"more news", remote[:9])
                for peer, (_, remote) in zip(peers, directory, strict=True)
            ),
            return_exceptions=True,
        )
        failed = [i for i, result in enumerate(results) if isinstance(result, Exception)]
        print(f"more news: {TARGETS - len(failed)} have it, target {failed} failed: {type(results[13]).__name__}")
        others = (mailbox for i, mailbox in enumerate(mailboxes) if i != 13)
        print(f"the others have it: {all(mailbox.startswith(b'more news') for mailbox in others)}")

        # The pool has reset the stream by now, or does so before it's used again.
        await pool.rdma_write(peers[12], b"and more", directory[12][1][:8])
        used = [lane for lane in pool.statistics() if lane.posted]
        print(
            f"{sum(lane.posted for lane in used)} writes on {len(used)} of {len(pool.lanes)} streams, "
            f"{sum(lane.errors for lane in used)} failed"
        )


asyncio.run(main())
