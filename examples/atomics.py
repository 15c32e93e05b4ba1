"""Atomics: a counter and a lock in a peer's memory, safe against any number of clients.

Run it:  python examples/atomics.py
"""

import array
import asyncio

import aiordma


async def take_tickets(
    name: str, qp: aiordma.QueuePair, scratch: aiordma.MemorySlice, counter: aiordma.RemoteBuffer
) -> list[int]:
    tickets = []
    for _ in range(3):
        # Adds 1 and brings what was there before, in one step that nobody can come between. `scratch` is 8 bytes that the
        # device puts the old value into; `value` is the same as a number.
        done = await qp.atomic_fetch_add(scratch, counter, 1)
        tickets.append(done.value)
    print(f"{name} took tickets {tickets}")
    return tickets


async def try_lock(qp: aiordma.QueuePair, scratch: aiordma.MemorySlice, lock: aiordma.RemoteBuffer, owner: int) -> bool:
    # Stores `owner` if 0 is there. It took effect if the old value is the one that was compared with.
    done = await qp.atomic_cmp_swp(scratch, lock, compare=0, swap=owner)
    return done.value == 0


async def main() -> None:
    # What the peer serves: two 64-bit words, the counter and the lock. Their addresses must be multiples of 8, which those
    # of an array of 64-bit numbers are.
    words = array.array("Q", [100, 0])
    async with (
        aiordma.open_device() as device,
        device.reg_mr(words) as served,
        device.reg_mr(bytearray(16)) as scratch,
        # Two clients, each with a connection of its own.
        device.create_qp() as alice,
        device.create_qp() as alice_peer,
        device.create_qp() as bob,
        device.create_qp() as bob_peer,
    ):
        print(f"device: {device.describe()}")
        for client, peer in ((alice, alice_peer), (bob, bob_peer)):
            await client.connect(peer.info)
            await peer.connect(client.info)
        counter, lock = served.remote()[0:8], served.remote()[8:16]

        taken = await asyncio.gather(
            take_tickets("alice", alice, scratch[0:8], counter),
            take_tickets("bob", bob, scratch[8:16], counter),
        )
        print(f"all different: {len(set(taken[0] + taken[1])) == 6}; the counter is at {words[0]}")

        print(f"alice gets the lock: {await try_lock(alice, scratch[0:8], lock, owner=1)}")
        print(f"bob gets the lock: {await try_lock(bob, scratch[8:16], lock, owner=2)}")
        # Only the owner unlocks, so a plain write will do.
        await alice.rdma_write(bytes(8), lock)
        print(f"bob gets the lock now: {await try_lock(bob, scratch[8:16], lock, owner=2)}")


asyncio.run(main())
