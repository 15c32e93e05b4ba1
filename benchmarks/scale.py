"""What an operation costs with many queue pairs on one device and many memory regions, beside one of each.

scale.py [QPS [REGIONS]]

Two processes, one with one connected pair of queue pairs and one region, one with QPS queue pairs in all and REGIONS
regions, run the same number of writes in turns, ten rounds each. The many take turns: each write goes over the next queue
pair and from the next region. All queue pairs of a device complete on one pair of CQs. Prints the medians, the ratio, and
the resident memory of a queue pair.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

OPS, WINDOW, ROUNDS = 20_000, 64, 10
REGION = 4096


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def work(connections: int, regions: int) -> None:
    """Serve one side: a line of input is a round, a line of output its seconds and those of the process's CPU time."""
    import aiordma

    async with aiordma.open_device("emulated") as device:
        buffer = bytearray(REGION * regions)
        target = await device.reg_mr(bytearray(REGION))
        config = {"max_send_wr": WINDOW, "max_recv_wr": 1, "max_send_sge": 1, "max_recv_sge": 1}
        before = resident()
        pairs = []
        for _ in range(connections):
            a, b = await device.create_qp(**config), await device.create_qp(**config)
            await a.connect(b.info)
            await b.connect(a.info)
            pairs.append((a, b))
        memory = resident() - before
        view = memoryview(buffer)
        sources = [await device.reg_mr(view[i * REGION : (i + 1) * REGION]) for i in range(regions)]
        slices = [s[:8] for s in sources]
        remote = target.remote()[:8]
        writes = [a.rdma_write for a, _ in pairs]
        print(json.dumps({"bytes": memory / (2 * connections)}), flush=True)
        turn = 0
        while await asyncio.to_thread(sys.stdin.readline):
            begin, cpu = time.perf_counter(), time.process_time()
            flying: deque[aiordma.Completion] = deque()
            for _ in range(OPS):
                if len(flying) == WINDOW:
                    await flying.popleft()
                flying.append(writes[turn % connections](slices[turn % regions], remote))
                turn += 1
            while flying:
                await flying.popleft()
            print(json.dumps({"wall": time.perf_counter() - begin, "cpu": time.process_time() - cpu}), flush=True)
        for pair in pairs:
            for qp in pair:
                await qp.close()
        for region in sources:
            await region.close()
        await target.close()


class Side:
    """One of the two processes."""

    def __init__(self, qps: int, regions: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "side", str(qps), str(regions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.bytes = self._read()["bytes"]
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer

    def round(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self._read()
        self.wall.append(answer["wall"] / OPS * 1e9)
        self.cpu.append(answer["cpu"] / OPS * 1e9)


def main(qps: int = 1000, regions: int = 10_000) -> None:
    sides = {"one": Side(1, 1), "many": Side(max(1, qps // 2), regions)}
    for _ in range(ROUNDS):
        for side in sides.values():
            side.round()
    for name, side in sides.items():
        print(
            f"{name}: {statistics.median(side.wall):.0f} ns an operation, {statistics.median(side.cpu):.0f} ns of CPU time"
        )
        assert side.process.stdin is not None
        side.process.stdin.close()
        side.process.wait()
    ratio = statistics.median(sides["many"].wall) / statistics.median(sides["one"].wall)
    print(f"{qps} QPs, {regions} MRs: {ratio:.2f} times the time of one; {sides['many'].bytes:.0f} bytes resident a QP")


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        asyncio.run(work(int(sys.argv[2]), int(sys.argv[3])))
    else:
        main(*map(int, sys.argv[1:]))
